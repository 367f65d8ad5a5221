// The dashboard: takes the figures of each second, and shows their differences.
import { differences, fraction, milliseconds, number, quantile } from "./figures.js";
import { curve, heat, lines } from "./charts.js";
import { drawn } from "./graph.js";

const KEPT = 600; // seconds of history
const FINE = 60; // seconds in which all that comes is kept; of what is older, one of each STEP
const STEP = 5; // seconds, as the server keeps the figures from before the page was opened
const WINDOW = 10; // seconds that a figure is the mean of
const history = [];
const views = new Map();

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Tiles by name, made at their first use. */
function tiles(parent) {
  const list = parent.appendChild(element("dl", { class: "tiles" }));
  const made = new Map();
  return (name, text, isBad = false) => {
    if (!made.has(name)) {
      const value = element("dd");
      const tile = list.appendChild(element("div", { class: "tile" }, element("dt", {}, name), value));
      tile.dataset.name = name;
      made.set(name, [tile, value]);
    }
    const [tile, value] = made.get(name);
    setText(value, text);
    tile.classList.toggle("bad", isBad);
  };
}

function heading() {
  return element("th", { scope: "row" }, element("span"), element("small"));
}

/** A table of two columns, whose rows are made as they come; a detail stands small below the name. */
function table(parent, title) {
  const body = element("tbody");
  const whole = parent.appendChild(element("table", {}, element("caption", {}, title), body));
  return (rows) => {
    whole.hidden = rows.length === 0;
    while (body.rows.length > rows.length) body.deleteRow(-1);
    rows.forEach(([name, text, state, detail], i) => {
      const row = body.rows[i] ?? body.appendChild(element("tr", {}, heading(), element("td")));
      setText(row.cells[0].firstChild, name);
      setText(row.cells[0].lastChild, detail ?? "");
      setText(row.cells[1], text);
      row.cells[1].className = state ? `state-${state}` : "";
    });
  };
}

function chart(parent, title, make, ...more) {
  const box = element("div");
  parent.append(element("div", { class: "chart" }, element("h4", {}, title), box));
  return make(box, title, ...more);
}

function serviceView({ name, graph }) {
  const section = element("section", { "aria-label": name }, element("h2", {}, name));
  document.getElementById("services").append(section);
  const tile = tiles(section);
  const draw = graph ? drawn(section, graph, name) : null;
  const charts = section.appendChild(element("div", { class: "charts" }));
  return {
    tile,
    draw,
    section,
    rate: chart(charts, "Requests a second", lines, ["answered", "refused or failed"]),
    latency: chart(charts, "Latency, ms", lines, ["p50", "p95", "p99"]),
    stages: new Map(),
    lost: table(section.appendChild(element("div", { class: "tables" })), "What became of all requests"),
  };
}

function stageView(parent, name) {
  const article = parent.appendChild(element("article", { "aria-label": `stage ${name}` }, element("h3", {}, `Stage ${name}`)));
  const decision = article.appendChild(element("p", { class: "decision" }));
  const tile = tiles(article);
  const charts = article.appendChild(element("div", { class: "charts" }));
  const queue = chart(charts, "Waiting requests", lines, ["in the queue"]);
  const times = chart(charts, "Mean time, ms", lines, ["in the queue", "of a batch"]);
  const sizes = chart(charts, "Batch sizes of the last ten minutes", heat);
  const cost = chart(charts, "Learned time by batch size, ms", curve);
  const tables = article.appendChild(element("div", { class: "tables" }));
  return {
    article, decision, tile, queue, times, sizes, cost,
    reasons: table(tables, "Why batches went"),
    workers: table(tables, "Workers"),
  };
}

function series(pick) {
  return history.slice(1).map((now, i) => pick(history[i], now));
}

/** The services that are served now, and no others: they come and go while the server runs. */
function keepViewsOf(services) {
  for (const [run, view] of views) {
    if (services.some((service) => service.run === run)) continue;
    view.section.remove();
    views.delete(run);
  }
}

/** Pairs of moments one after the other, in which nothing has happened before the service was there. */
function pairs(now) {
  const found = (moment) => moment.services.find((service) => service.run === now.run);
  return series((earlier, later) => {
    const b = found(later) ?? now;
    return [found(earlier) ?? b, b, later.time - earlier.time];
  });
}

function showService(now, before) {
  if (!views.has(now.run)) views.set(now.run, serviceView(now));
  const view = views.get(now.run);
  const delta = differences(before, now);
  const { tile } = view;
  tile("Requests a second", number(delta.rate));
  tile("Refused or failed", `${number(delta.lostRate)} /s`, delta.lostRate > 0);
  for (const share of [0.5, 0.95, 0.99]) tile(`p${100 * share} latency`, milliseconds(quantile(delta.latency, share)));
  tile("In flight", number(now.in_flight));
  tile("Answered in all", number(now.outcomes.ok));
  if (now.slo_s !== null) {
    tile(`Within the SLO of ${milliseconds(now.slo_s)}`, fraction(delta.inSlo), delta.inSlo < 0.95);
  }
  if (now.streams) {
    tile("First part, p95", milliseconds(quantile(delta.firstPart, 0.95)));
    tile("Part to part, p95", milliseconds(quantile(delta.part, 0.95)));
    tile("Rows", number(now.streams.rows));
  }
  view.draw?.(now.graph, before.graph, now.seconds);
  const moments = pairs(now);
  const each = moments.map(([a, b, seconds]) => differences(a, b, seconds));
  const times = history.slice(1).map((moment) => moment.time - history.at(-1).time);
  view.rate([times, each.map((d) => d.okRate), each.map((d) => d.lostRate)]);
  view.latency([times, ...[0.5, 0.95, 0.99].map((q) => each.map((d) => 1000 * quantile(d.latency, q)))]);
  view.lost(Object.entries(now.outcomes).filter(([, n]) => n > 0).map(([outcome, n]) => [outcome.replaceAll("_", " "), number(n)]));
  now.stages.forEach((stage, i) => showStage(view, stage, before.stages[i] ?? stage, times, moments.map(([a, b]) => [a.stages[i], b.stages[i]])));
}

/** The batch sizes of each few seconds, from the first to now. */
function columns(sizes, times) {
  const slot = (time) => Math.floor(-time / STEP);
  const found = Array.from({ length: times.length ? slot(times[0]) + 1 : 0 }, () => []);
  sizes.forEach((each, i) => found[slot(times[i])].push(...each));
  return found.reverse();
}

function showStage(service, now, before, times, moments) {
  if (!service.stages.has(now.name)) service.stages.set(now.name, stageView(service.section, now.name));
  const view = service.stages.get(now.name);
  const delta = differences(before, now);
  const ready = now.workers.filter((worker) => worker.state === "ready").length;
  setText(view.decision, now.decision);
  view.article.classList.toggle("failed", now.has_failed);
  const { tile } = view;
  tile("Waiting", number(now.queued));
  tile("Time in the queue, p95", milliseconds(quantile(delta.queue, 0.95)));
  tile("Mean batch size", number(delta.meanBatch || NaN));
  tile("Time of a batch, p95", milliseconds(quantile(delta.compute, 0.95)));
  tile("Workers ready", `${ready} of ${now.workers.length}`, ready < now.workers.length);
  tile("Restarts", number(now.restarts));
  tile("Idle gap, mean", milliseconds(delta.idleGap));
  if (now.padding) tile("Padding", fraction(now.padding / (now.items + now.padding)));
  const each = moments.map(([a, b]) => differences(a, b));
  view.queue([times, moments.map(([, b]) => b.queued)]);
  view.times([times, each.map((d) => 1000 * d.meanQueue), each.map((d) => 1000 * d.meanCompute)]);
  view.sizes(columns(each.map((d) => d.sizes), times));
  view.cost(now.cost);
  view.reasons(Object.entries(now.reasons).map(([reason, n]) => [reason, number(n)]));
  view.workers(now.workers.map((worker) => {
    const text = worker.restarts ? `${worker.state}, replaced ${worker.restarts} times` : worker.state;
    return [worker.name, text, worker.state, worker.where];
  }));
}

function showVerdict(problems, now) {
  const verdict = document.getElementById("verdict");
  const worst = problems.length === 0 ? "good" : problems.some((problem) => problem.level === "bad") ? "bad" : "warn";
  verdict.className = worst;
  const served = now.services.length === 1 ? now.services[0].name : `${now.services.length} services`;
  const count = problems.length === 1 ? "One thing needs a look" : `${problems.length} things need a look`;
  setText(document.getElementById("verdict-title"), worst === "good" ? `All is well with ${served}` : count);
  const list = document.getElementById("problems");
  const key = JSON.stringify(problems);
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  list.replaceChildren(...problems.map(({ text, step }) => element("li", {}, text, element("span", { class: "step" }, step))));
}

function remember(figures) {
  history.push(figures);
  while (figures.time - history[0].time > KEPT) history.shift();
  const isSpare = (moment, i) => i > 0 && figures.time - moment.time > FINE && history[i + 1].time - history[i - 1].time <= STEP;
  const spare = history.findIndex(isSpare);
  if (spare > 0) history.splice(spare, 1);
}

function show(message) {
  const { figures, problems } = message;
  remember(figures);
  const from = history.findLast((moment) => figures.time - moment.time >= WINDOW) ?? history[0];
  showVerdict(problems, figures);
  keepViewsOf(figures.services);
  for (const service of figures.services) {
    const before = from.services.find((other) => other.run === service.run) ?? service;
    service.seconds = Math.max(figures.time - from.time, 1e-9);
    showService(service, before);
  }
  document.documentElement.dataset.figures = JSON.stringify(figures);
}

function listen() {
  const events = new EventSource("dashboard/events");
  events.onopen = () => setText(document.getElementById("connection"), "live");
  events.onmessage = (event) => show(JSON.parse(event.data));
  events.onerror = () => {
    setText(document.getElementById("connection"), "The server does not answer; trying again");
    document.getElementById("verdict").className = "bad";
    setText(document.getElementById("verdict-title"), "The server does not answer");
  };
}

/** Takes what the server has kept of the time before the page was opened. */
async function recall() {
  const answer = await fetch("dashboard/history");
  if (answer.ok) history.push(...await answer.json());
}

recall().catch(() => {}).then(listen);
