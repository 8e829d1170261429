// A server of a search, as a client in JavaScript sees it: who it is, is proved on both sides. How, is at
// the head of protos/search/v1/search.proto.
'use strict';
const crypto = require('node:crypto');
const path = require('node:path');
const grpc = require('@grpc/grpc-js');
const protoLoader = require('@grpc/proto-loader');

const ANSWER_S = 10; // that a server has to answer
const MESSAGES = protoLoader.loadSync(['courier/v1/courier.proto', 'search/v1/search.proto'], {
  includeDirs: [path.join(__dirname, '..', '..', 'protos')],
  keepCase: true,
  defaults: true,
  enums: String,
});

function hmac(key, ...parts) {
  const sum = crypto.createHmac('sha256', key);
  for (const part of parts) sum.update(part);
  return sum.digest();
}

function credentialsOf(tls) {
  if (!tls) return grpc.credentials.createInsecure();
  const [authority, key, certificate] = [tls.authority, tls.key, tls.certificate].map(Buffer.from);
  // The authority is the program's own, so no name has to be in the certificate.
  const options = { checkServerIdentity: () => undefined };
  return grpc.credentials.createSsl(authority, key, certificate, options);
}

class Server {
  // `info` is what join.json has; `address` is that of the server.
  constructor(info, address) {
    this.secret = Buffer.from(info.secret ?? '', 'hex');
    const options = { 'grpc.max_receive_message_length': -1, 'grpc.enable_http_proxy': 0 };
    this.client = new grpc.Client(address, credentialsOf(info.tls), options);
  }

  // Calls a method of a service; `waitS` are the seconds that it may wait for something.
  async ask(service, name, request, waitS = 0) {
    const method = MESSAGES[`search.v1.${service}`][name];
    this.session ??= this.hello();
    let session;
    try {
      session = await this.session;
      const number = ++session.sequence;
      const bytes = method.requestSerialize(request);
      const metadata = new grpc.Metadata();
      metadata.set('courier-session-bin', session.name);
      metadata.set('courier-sequence', String(number));
      metadata.set('courier-seal-bin', seal(session.key, 'request', method.path, number, bytes));
      const [reply, trailing] = await this.send(method.path, bytes, metadata, waitS);
      const [found] = trailing.get('courier-seal-bin');
      if (!found?.equals(seal(session.key, 'reply', method.path, number, reply))) {
        throw new Error('the reply is not that of the server');
      }
      return method.responseDeserialize(reply);
    } catch (error) {
      // The server was started again, or has forgotten the session: the next call says hello.
      if (!session || error.code === grpc.status.UNAUTHENTICATED) this.session = undefined;
      throw error;
    }
  }

  async hello() {
    const method = MESSAGES['courier.v1.Courier'].Hello;
    const nonce = crypto.randomBytes(32);
    const request = method.requestSerialize({ nonce });
    const [bytes] = await this.send(method.path, request, new grpc.Metadata(), 0);
    const reply = method.responseDeserialize(bytes);
    const key = hmac(this.secret, 'courier.v1 session', nonce, reply.nonce);
    if (!hmac(key, 'courier.v1 server').equals(reply.proof)) {
      throw new Error('the secret is not that of the server');
    }
    return { key, name: reply.session, sequence: 0 };
  }

  // Sends bytes; returns those of the reply, and its trailing metadata.
  send(methodPath, bytes, metadata, waitS) {
    return new Promise((resolve, reject) => {
      let reply;
      const same = (value) => value;
      const options = { deadline: Date.now() + 1000 * (waitS + ANSWER_S) };
      const call = this.client.makeUnaryRequest(methodPath, same, same, bytes, metadata, options, (error, value) => {
        if (error) reject(error);
        reply = value;
      });
      call.on('status', (status) => resolve([reply, status.metadata]));
      if (waitS) this.waiting = call;
    });
  }

  // Ends a call that waits for something.
  cancel() {
    this.waiting?.cancel();
  }
}

function seal(key, direction, methodPath, number, bytes) {
  const eight = Buffer.alloc(8);
  eight.writeBigUInt64BE(BigInt(number));
  const digest = crypto.createHash('sha256').update(bytes).digest();
  return hmac(key, `courier.v1 service ${direction}`, methodPath, eight, digest);
}

module.exports = { Server };
