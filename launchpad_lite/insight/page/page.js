// The page of a program. All that nodes say is untrusted: it is shown as text, never as HTML.
"use strict";

// From the fragment, which no browser sends; not kept in the address bar or the history.
const TOKEN = location.hash.slice(1) || sessionStorage.getItem("token") || "";
sessionStorage.setItem("token", TOKEN);
history.replaceState(null, "", location.pathname);

const ROW = 22; // height of a row in pixels, as in the style sheet
const COLUMNS = ["node", "state", "host", "restarts", "cores", "MiB", "GPU MiB", "calls/s in",
  "out", "errors/s", "queued", "p50", "p99", "last line"];
const COLORS = ["#2563eb", "#d97706", "#059669", "#c026d3", "#dc2626", "#0891b2", "#65a30d", "#7c3aed"];
const at = id => document.getElementById(id);
const state = { nodes: [], edges: [], groups: [], folder: "" };
let sortBy = -1, down = false, chosen = null, tab = "logs", shape = "";

function make(tag, text, kind) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (kind) element.className = kind;
  return element;
}

async function ask(path) {
  const answer = await fetch(path, { headers: { Authorization: `Bearer ${TOKEN}` }, cache: "no-store" });
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found;
}

// Numbers

function short(value) {
  if (value === null || value === undefined) return "";
  const size = Math.abs(value);
  return size >= 1e6 ? `${(value / 1e6).toPrecision(3)}M` : size >= 1e4 ? `${(value / 1e3).toPrecision(3)}k`
    : Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(3)));
}

function delay(seconds) {
  if (seconds === null) return "";
  return seconds >= 1 ? `${short(seconds)} s` : seconds >= 1e-3 ? `${short(seconds * 1e3)} ms` : `${short(seconds * 1e6)} µs`;
}

function cellText(value, column) {
  return column === 11 || column === 12 ? delay(value) : typeof value === "number" ? short(value) : value ?? "";
}

// The table: only rows that can be seen are elements.

let order = [];

function sortNodes() {
  const word = at("find").value.toLowerCase();
  order = state.nodes.filter(each => !word || each[0].toLowerCase().includes(word) || each[1].includes(word));
  if (sortBy >= 0) {
    const sign = down ? -1 : 1;
    order.sort((a, b) => sign * (typeof (a[sortBy] ?? 0) === "number" ? (a[sortBy] ?? -1) - (b[sortBy] ?? -1)
      : String(a[sortBy]).localeCompare(String(b[sortBy]))));
  }
  at("count").textContent = `${order.length} of ${state.nodes.length}`;
  at("space").style.height = `${order.length * ROW}px`;
}

function drawRows() {
  const box = at("scroll"), rows = at("rows");
  const first = Math.max(0, Math.floor(box.scrollTop / ROW) - 2);
  const seen = order.slice(first, first + Math.ceil(box.clientHeight / ROW) + 4);
  rows.style.top = `${first * ROW}px`;
  while (rows.children.length > seen.length) rows.lastChild.remove();
  while (rows.children.length < seen.length) {
    const row = make("div", undefined, "row");
    COLUMNS.forEach(() => row.append(make("span")));
    row.onclick = () => choose(row.dataset.node);
    rows.append(row);
  }
  seen.forEach((node, index) => {
    const row = rows.children[index];
    row.dataset.node = node[0];
    row.className = node[0] === chosen ? "row on" : "row";
    node.forEach((value, column) => {
      const cell = row.children[column], text = cellText(value, column);
      if (cell.textContent !== text) cell.textContent = cell.title = text;
      const kind = column === 1 ? value : column === 13 ? "last" : column > 2 ? "number" : "";
      if (cell.className !== kind) cell.className = kind;
    });
  });
}

function drawTable() {
  at("nodes").classList.toggle("gpu", state.nodes.some(each => each[6] !== null));
  sortNodes();
  drawRows();
}

// The graph: a box for each group, in columns from callers to callees.

const SVG = "http://www.w3.org/2000/svg";
function svg(tag, values, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(values)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function layers() {
  // As far right as the longest chain of callers; a circle of calls stops it.
  const layer = new Map(state.groups.map(([label]) => [label, 0]));
  for (let round = 0; round < Math.min(state.groups.length, 12); round++)
    for (const [from, to] of state.edges)
      if (from !== to && layer.get(to) <= layer.get(from) && layer.get(from) < state.groups.length - 1)
        layer.set(to, layer.get(from) + 1);
  return layer;
}

function drawGraph() {
  const now = JSON.stringify([state.groups.map(each => each.slice(0, 2)), state.edges.map(each => each.slice(0, 2))]);
  if (now !== shape) { shape = now; layOut(); }
  for (const [label, , bad] of state.groups) at("graph").boxes.get(label).classList.toggle("bad", bad > 0);
  state.edges.forEach(([, , calls], index) => {
    const [path, text] = at("graph").arrows[index];
    path.classList.toggle("busy", calls > 0);
    const shown = calls === null ? "" : `${short(calls)}/s`;
    if (text.textContent !== shown) text.textContent = shown;
  });
}

function layOut() {
  const WIDTH = 130, HEIGHT = 34, layer = layers(), places = new Map(), used = [];
  for (const [label] of state.groups) {
    const x = layer.get(label), y = used[x] = (used[x] ?? -1) + 1;
    places.set(label, [10 + x * (WIDTH + 90), 14 + y * (HEIGHT + 26)]);
  }
  const all = [...places.values()];
  const width = Math.max(0, ...all.map(([x]) => x)) + WIDTH + 30, height = Math.max(0, ...all.map(([, y]) => y)) + HEIGHT + 24;
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  const marker = svg("marker", { id: "tip", viewBox: "0 0 8 8", refX: 8, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" });
  marker.append(svg("path", { d: "M0,0 L8,4 L0,8 z" }));
  picture.append(marker);
  at("graph").boxes = new Map();
  at("graph").arrows = state.edges.map(([from, to]) => {
    const [x1, y1] = places.get(from), [x2, y2] = places.get(to), forward = x2 > x1;
    const start = [x1 + (forward ? WIDTH : WIDTH / 2), y1 + (forward ? HEIGHT / 2 : HEIGHT)];
    const end = [x2 + (forward ? 0 : WIDTH / 2), y2 + (forward ? HEIGHT / 2 : HEIGHT)];
    const bend = forward ? `C${start[0] + 45},${start[1]} ${end[0] - 45},${end[1]}` : `C${start[0]},${start[1] + 30} ${end[0] + 20},${end[1] + 30}`;
    const path = svg("path", { d: `M${start} ${bend} ${end}`, "marker-end": "url(#tip)" });
    // Near the caller, where those of other arrows are not.
    const text = svg("text", { x: start[0] + (end[0] - start[0]) * 0.3, y: start[1] + (end[1] - start[1]) * 0.25 + (forward ? -3 : 22), "text-anchor": "middle", class: "calls" });
    picture.append(path);
    return [path, text];
  });
  for (const [label, count] of state.groups) {
    const [x, y] = places.get(label);
    const box = svg("rect", { x, y, width: WIDTH, height: HEIGHT, rx: 5 });
    box.onclick = () => { at("find").value = `${label}[`; drawTable(); };
    at("graph").boxes.set(label, box);
    const name = count > 1 ? `${label} × ${count}` : label;
    picture.append(box, svg("text", { x: x + WIDTH / 2, y: y + 21, "text-anchor": "middle", "pointer-events": "none" }, name.length > 20 ? `${name.slice(0, 19)}…` : name));
  }
  picture.append(...at("graph").arrows.map(([, text]) => text));
  at("graph").replaceChildren(picture);
}

// Charts, and what nodes show of themselves

function drawViews(views) {
  at("views").hidden = !Object.keys(views).length;
  at("views").replaceChildren(...Object.entries(views).map(([name, text]) => {
    const figure = make("figure");
    figure.append(make("b", name), make("pre", text));
    return figure;
  }));
}

function drawCharts(charts) {
  const box = at("charts");
  while (box.children.length > charts.length) box.lastChild.remove();
  charts.forEach((chart, index) => {
    if (!box.children[index]) {
      const figure = make("figure");
      figure.append(make("canvas"), make("figcaption"));
      box.append(figure);
    }
    const [canvas, caption] = box.children[index].children;
    caption.replaceChildren(make("b", chart.title), ...chart.lines.map((line, place) => {
      const last = line.v.findLast(value => value !== null);
      const part = make("span", `${line.name} ${short(last)}`);
      part.style.color = COLORS[place % COLORS.length];
      return part;
    }), ...(chart.more ? [make("span", `and ${chart.more} more`)] : []));
    drawChart(canvas, chart.lines);
  });
}

function drawChart(canvas, lines) {
  const scale = devicePixelRatio, width = 300, height = 110, left = 38, bottom = 14;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d"), style = getComputedStyle(document.body);
  pen.scale(scale, scale);
  pen.font = "10px system-ui";
  const times = lines.flatMap(line => line.t), values = lines.flatMap(line => line.v).filter(value => value !== null);
  if (!values.length) return;
  const t0 = Math.min(...times), t1 = Math.max(...times, t0 + 1);
  let low = Math.min(...values), high = Math.max(...values);
  if (low > 0 && low < high / 2) low = 0;
  if (low === high) [low, high] = [low - (low ? Math.abs(low) / 10 : 0), high + (high ? Math.abs(high) / 10 : 1)];
  const x = t => left + (t - t0) / (t1 - t0) * (width - left - 4), y = value => 6 + (high - value) / (high - low) * (height - bottom - 8);
  pen.fillStyle = style.getPropertyValue("--dim");
  pen.strokeStyle = style.getPropertyValue("--line");
  for (const value of [low, (low + high) / 2, high]) {
    pen.beginPath(); pen.moveTo(left, y(value)); pen.lineTo(width - 4, y(value)); pen.stroke();
    pen.textAlign = "right"; pen.fillText(short(value), left - 4, y(value) + 3);
  }
  const clock = t => new Date(t * 1000).toLocaleTimeString();
  pen.textAlign = "left"; pen.fillText(clock(t0), left, height - 2);
  pen.textAlign = "right"; pen.fillText(clock(t1), width - 4, height - 2);
  lines.forEach((line, index) => {
    pen.strokeStyle = COLORS[index % COLORS.length];
    pen.lineWidth = 1.4;
    pen.beginPath();
    let isDown = false;
    line.t.forEach((t, place) => {
      const value = line.v[place];
      if (value === null) { isDown = false; return; }
      if (isDown) pen.lineTo(x(t), y(value)); else pen.moveTo(x(t), y(value));
      isDown = true;
    });
    if (isDown) pen.lineTo(x(t1), y(line.v.at(-1))); // rows are of changes
    pen.stroke();
  });
}

// One node: its logs, its stack, its numbers, its profile

function choose(node) {
  chosen = node;
  at("detail").hidden = false;
  drawRows();
  showTab(tab === "why" ? "logs" : tab);
}

let asked = 0;
async function showTab(name) {
  tab = name;
  const number = ++asked, box = at("text");
  at("chosen").textContent = name === "why" ? "who waits for whom" : chosen;
  at("search").hidden = name !== "logs";
  for (const button of document.querySelectorAll("[data-tab]")) {
    button.classList.toggle("on", button.dataset.tab === name);
    button.hidden = name === "why";
  }
  const query = new URLSearchParams({ node: chosen ?? "", search: at("search").value });
  let text, svg;
  at("picture").hidden = true;
  if (name === "profile") box.textContent = "it is sampled for 2 s";
  try { ({ text, svg } = await ask(`api/${name}?${query}`)); } catch (error) { text = error.message; }
  if (number !== asked) return;
  if (svg) {
    // As an image: it runs no scripts, and loads nothing.
    at("flame").src = at("save").href = `data:image/svg+xml,${encodeURIComponent(svg)}`;
    at("picture").hidden = false;
  }
  if (box.textContent === text) return;
  const isAtEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 5;
  box.textContent = text;
  if (name === "logs" && isAtEnd) box.scrollTop = box.scrollHeight;
}

// Renewal: only while the page can be seen

const took = []; // milliseconds of the last renewals
let curvesAt = 0, timer = 0;
async function renew() {
  clearTimeout(timer);
  if (document.hidden) return;
  let period = 1;
  try {
    const found = await ask("api/state");
    Object.assign(state, found);
    period = found.period_s;
    at("title").textContent = document.title = found.title;
    at("note").textContent = period ? "" : state.folder;
    const began = performance.now();
    drawGraph();
    drawTable();
    if (performance.now() > curvesAt || !period) {
      const curves = await ask("api/curves");
      drawCharts(curves.charts);
      drawViews(curves.views);
      curvesAt = performance.now() + 5000 * period;
    }
    // A search reads a whole log, so it is done when it is typed.
    if (!at("detail").hidden && tab === "logs" && !at("search").value) showTab("logs");
    took.splice(0, took.length - 99);
    took.push(performance.now() - began);
  } catch (error) {
    at("note").textContent = !(error instanceof TypeError) ? error.message
      : `nobody serves this page any more${state.folder && `: python -m launchpad_lite.launch dashboard ${state.folder}`}`;
    period = 5;
  }
  if (period) timer = setTimeout(renew, period * 1000);
}

at("head").append(...COLUMNS.map((name, column) => {
  const cell = make("span", name, column > 2 && column < 13 ? "number" : "");
  cell.onclick = () => { down = sortBy === column ? !down : column > 2; sortBy = column; drawTable(); };
  return cell;
}));
at("find").oninput = drawTable;
at("scroll").onscroll = drawRows;
at("search").oninput = () => showTab("logs");
at("why").onclick = () => { at("detail").hidden = false; showTab("why"); };
at("close").onclick = () => { at("detail").hidden = true; chosen = null; drawRows(); };
for (const button of document.querySelectorAll("[data-tab]")) button.onclick = () => showTab(button.dataset.tab);
document.addEventListener("visibilitychange", renew);
renew();
