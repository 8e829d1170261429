// A worker of a search, in JavaScript:
//
//   npm install
//   node worker.js FOLDER/join.json [NAME]
//
// It joins a running search and takes tasks such as search.Foreign("js", b"[1.5, 2]"), or b"[1.5, 2, 10]",
// which takes 10 seconds. Ctrl-C or SIGTERM: it leaves after its task; a second one ends it at once.
'use strict';
const fs = require('node:fs');
const os = require('node:os');
const { randomUUID } = require('node:crypto');
const { setTimeout: pause } = require('node:timers/promises');
const { Worker, isMainThread, parentPort } = require('node:worker_threads');

// What this worker can do, by the kind of the task: from its bytes to those of its result.
const FUNCTIONS = {
  js(payload) {
    const [x, y, seconds = 0] = JSON.parse(payload);
    Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 1000 * seconds); // as if it was hard
    return JSON.stringify((1 - x) ** 2 + 100 * (y - x * x) ** 2); // Rosenbrock: 0 at [1, 1]
  },
};
const ALONE_S = 60; // without a broker, until it gives up

async function main(file, name = `${os.hostname()}-${process.pid}`) {
  const { Server } = require('./server');
  const info = JSON.parse(fs.readFileSync(file));
  const me = { worker: { name, life: randomUUID() } };
  const names = new Server(info, info.address);
  const { beat_s, poll_s } = await names.ask('NameServer', 'Register', me);
  let broker = null; // its name and server
  let task = null; // what runs now
  let thread = null; // where it runs
  let outcomes = []; // that are not handed in
  let isOver = false;

  async function showToNames() {
    const seen = await names.ask('NameServer', 'Beat', { ...me, broker: broker?.name ?? '' });
    if (!seen.is_known) await names.ask('NameServer', 'Register', me);
    isOver ||= seen.is_over;
  }

  async function showToBroker() {
    const held = [task, ...outcomes].filter(Boolean).map(({ id, token }) => ({ id, token }));
    const { stops } = await broker.server.ask('Broker', 'Beat', { ...me, held });
    if (stops.includes(task?.id)) task.stop();
  }

  const beating = setInterval(() => {
    showToNames().catch(() => {}); // the work goes on without the name server
    if (broker) showToBroker().catch(() => {}); // who asks for tasks notices it
  }, 1000 * beat_s);

  for (const signal of ['SIGINT', 'SIGTERM']) {
    process.once(signal, () => {
      isOver = true;
      if (!task) broker?.server.cancel();
    });
  }

  async function work(avoid) {
    if (!broker) {
      const place = await names.ask('NameServer', 'Place', { ...me, avoid });
      if (!place.broker) return pause(200);
      broker = { name: place.broker, server: new Server(info, place.address) };
    }
    const wish = { kinds: Object.keys(FUNCTIONS), count: 1, wait_s: poll_s };
    const reply = await broker.server.ask('Broker', 'Work', { ...me, outcomes, ...wish }, poll_s);
    outcomes = [];
    isOver ||= reply.is_over;
    for (const assignment of reply.assignments) outcomes.push(await run(assignment));
  }

  // Tasks run in another thread, where they hold up no heartbeat.
  function startThread() {
    const started = new Worker(__filename);
    const end = (state, fields) => {
      if (started !== thread) return; // it was to end
      if (state !== 'DONE') thread = null;
      task?.end(state, fields);
    };
    started.on('message', (result) => end('DONE', { payload: Buffer.from(result) }));
    started.on('error', (error) => end('FAILED', { text: error.stack ?? String(error) }));
    started.on('exit', () => end('FAILED', { text: 'its thread has ended' }));
    return started;
  }

  function run({ id, token, kind, payload }) {
    const beganAt = Date.now();
    return new Promise((resolve) => {
      const end = (state, fields = {}) => {
        task = null;
        resolve({ id, token, state, seconds: (Date.now() - beganAt) / 1000, ...fields });
      };
      const stop = () => {
        thread.terminate();
        thread = null;
        end('STOPPED');
      };
      task = { id, token, end, stop };
      thread ??= startThread();
      thread.postMessage({ kind, payload });
    });
  }

  console.log(`${name} works for the search at ${info.address}`);
  let [avoid, heardAt] = [[], Date.now()];
  while (!isOver) {
    try {
      await work(avoid);
      [avoid, heardAt] = [[], Date.now()];
    } catch (error) {
      if (!isOver && Date.now() - heardAt > 1000 * ALONE_S) throw error;
      if (isOver) break;
      avoid = broker ? [broker.name] : [];
      broker = null; // the next one takes what this one was to get: the first outcome of a task counts
      await pause(200);
    }
  }
  clearInterval(beating);
  await broker?.server.ask('Broker', 'Leave', { ...me, outcomes }).catch(() => {});
  await names.ask('NameServer', 'Leave', me).catch(() => {});
}

function fail(error) {
  console.error(`error: ${error.details || error.message}`);
  process.exit(1);
}

if (isMainThread) {
  main(...process.argv.slice(2)).then(() => process.exit(0), fail);
} else {
  parentPort.on('message', ({ kind, payload }) => {
    parentPort.postMessage(FUNCTIONS[kind](Buffer.from(payload)));
  });
}
