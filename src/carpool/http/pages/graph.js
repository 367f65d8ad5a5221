// A graph drawn: stages as boxes, where blocks open and close as dots, and load and waiting time on
// the lines that lead to stages.
import { milliseconds, number } from "./figures.js";

const WIDE = 176; // pixels of a stage's width in a picture, with the line that leads to it
const HIGH = 84;
const BOX = { width: 104, height: 40 };
const RADIUS = 6;
const BEND = 20; // pixels in which a line comes to its height
const OPENS = ["start", "parallel", "route", "list"];
const SIGNS = { parallel: "all", route: "one of", list: "each item", values: "errors are values" };
const SVG = "http://www.w3.org/2000/svg";

function made(parent, name, attributes = {}, text = "") {
  const found = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  found.textContent = text;
  return parent.appendChild(found);
}

function shortened(name, most) {
  return name.length > most ? `${name.slice(0, most - 1)}…` : name;
}

/** How far a dot reaches to each side of its middle. */
function reach(dot) {
  return dot.kind === "stage" ? BOX.width / 2 : RADIUS;
}

function drawDot(svg, dot) {
  const [x, y] = [dot.x * WIDE, dot.y * HIGH];
  if (dot.kind !== "stage") {
    made(svg, "circle", { cx: x, cy: y, r: RADIUS, class: `dot ${dot.kind}` });
    const sign = SIGNS[dot.kind];
    if (sign) made(svg, "text", { x, y: y - RADIUS - 5, class: "sign" }, sign);
    if (dot.name) made(svg, "text", { x, y: y + RADIUS + 14, class: "sign" }, SIGNS[dot.name] ?? dot.name);
    return { update: () => {} };
  }
  const group = made(svg, "g", { class: "stage" });
  made(group, "title", {}, dot.place);
  made(group, "rect", { x: x - BOX.width / 2, y: y - BOX.height / 2, width: BOX.width, height: BOX.height, rx: 6 });
  made(group, "text", { x, y: y - 3, class: "name" }, shortened(dot.name, 14));
  const running = made(group, "text", { x, y: y + 13, class: "sign" });
  return { update: (now) => (running.textContent = `${number(now.running)} running`) };
}

/** The path of a line: it bends where it leaves its dot and where it comes to the next, if it must. */
function pathOf(x, y, row, right, low) {
  const begins = y === row ? `M ${x} ${y}` : `M ${x} ${y} C ${x + BEND} ${y} ${x} ${row} ${x + BEND} ${row}`;
  return low === row ? `${begins} L ${right} ${row}` : `${begins} L ${right - BEND} ${row} C ${right} ${row} ${right - BEND} ${low} ${right} ${low}`;
}

function drawLink(svg, [begins, ends, name, height], dots) {
  const [from, to] = [dots[begins], dots[ends]];
  const [x, y] = [from.x * WIDE + reach(from), from.y * HIGH];
  const [right, low] = [to.x * WIDE - reach(to), to.y * HIGH];
  const row = height !== null ? height * HIGH : OPENS.includes(from.kind) ? low : y;
  const path = made(svg, "path", { d: pathOf(x, y, row, right, low), class: "link" });
  if (name) {
    const at = to.kind === "stage" ? { x: to.x * WIDE, y: low - BOX.height / 2 - 5 } : { x: (x + right) / 2, y: row - 6 };
    made(svg, "text", { ...at, class: "branch" }, shortened(name, 16));
  }
  const edge = right - 6;
  if (to.kind !== "stage") return { update: () => {} };
  const rate = made(svg, "text", { x: edge, y: low - 6, class: "load" });
  const wait = made(svg, "text", { x: edge, y: low + 15, class: "load" });
  return {
    update: (now, before, seconds, most) => {
      const came = now.entered - before.entered;
      rate.textContent = came ? `${number(came / seconds)}/s` : "";
      wait.textContent = came ? milliseconds((now.waited_s - before.waited_s) / came) : "";
      if (now.queued) wait.textContent += ` (${number(now.queued)})`;
      path.setAttribute("stroke-width", 1 + (most ? (4 * came) / most : 0));
      path.classList.toggle("waits", now.queued > 0);
    },
  };
}

/** Draws a graph, and returns a function that shows what has happened in it between two moments. */
export function drawn(parent, graph, name) {
  const box = parent.appendChild(document.createElement("div"));
  box.className = "graph";
  const size = { width: graph.width * WIDE, height: graph.height * HIGH };
  const svg = made(box, "svg", { ...size, viewBox: `0 0 ${size.width} ${size.height}`, role: "img", "aria-label": `the graph of ${name}` });
  svg.style.minWidth = `${0.65 * size.width}px`; // below that a page scrolls, as texts would be too small
  const links = graph.links.map((link) => [link[1], drawLink(svg, link, graph.dots)]);
  const dots = graph.dots.map((dot) => drawDot(svg, dot));
  return (now, before, seconds) => {
    const came = now.dots.map((dot, i) => (dot.entered ?? 0) - (before.dots[i].entered ?? 0));
    const most = Math.max(...came);
    dots.forEach((dot, i) => dot.update(now.dots[i]));
    for (const [i, link] of links) link.update(now.dots[i], before.dots[i], seconds, most);
  };
}
