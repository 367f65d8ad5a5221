// Charts on a canvas: lines over time, a curve with its points, and a heat map of batch sizes.
const COLORS = ["one", "two", "three"];
const HEAD = 7; // pixels above a chart, for half of its topmost word, and below it, for the words of its axis
const FOOT = 17;
const dark = matchMedia("(prefers-color-scheme: dark)");

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** A canvas that `paint(pen, width, height)` fills, anew when its size or the colours change. */
function picture(box, paint) {
  const canvas = document.createElement("canvas");
  canvas.setAttribute("role", "img");
  box.append(canvas);
  const draw = () => {
    const { clientWidth: width, clientHeight: height } = canvas;
    canvas.width = width * devicePixelRatio;
    canvas.height = height * devicePixelRatio;
    const pen = canvas.getContext("2d");
    pen.scale(devicePixelRatio, devicePixelRatio);
    pen.font = "11px system-ui, sans-serif";
    paint(pen, width, height);
  };
  dark.addEventListener("change", draw);
  new ResizeObserver(draw).observe(canvas);
  return (label) => {
    canvas.setAttribute("aria-label", label);
    draw();
  };
}

function legend(box, names) {
  const line = document.createElement("p");
  line.className = "legend";
  names.forEach((name, i) => {
    const entry = document.createElement("span");
    entry.className = COLORS[i];
    entry.textContent = name;
    line.append(entry);
  });
  box.append(line);
}

/** Round numbers from `low` to `high`, about `wanted` of them. */
function ticks(low, high, wanted) {
  const least = (high - low) / Math.max(1, wanted) || 1;
  const power = 10 ** Math.floor(Math.log10(least));
  const step = power * [1, 2, 5, 10].find((n) => n * power >= least * 0.999);
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, i) => (first + i) * step);
}

function short(value) {
  return value.toLocaleString(undefined, { maximumSignificantDigits: 3 });
}

/** Axes with their words; returns the functions from values to pixels. */
function axes(pen, width, height, xs, most, inWords) {
  const top = most > 0 ? 1.1 * most : 1;
  const rows = ticks(0, top, height / 40);
  const left = 12 + Math.max(30, ...rows.map((value) => pen.measureText(short(value)).width));
  const low = xs[0] ?? 0;
  const span = (xs.at(-1) ?? 0) - low || 1;
  const x = (value) => left + ((value - low) / span) * (width - left - 12);
  const y = (value) => HEAD + (height - HEAD - FOOT) * (1 - value / top);
  pen.strokeStyle = color("line");
  pen.fillStyle = color("soft");
  const rule = (...points) => {
    pen.beginPath();
    pen.moveTo(points[0], points[1]);
    pen.lineTo(points[2], points[3]);
    pen.stroke();
  };
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  for (const value of rows) {
    rule(left, y(value), width - 12, y(value));
    pen.fillText(short(value), left - 6, y(value));
  }
  pen.textAlign = "center";
  pen.textBaseline = "alphabetic";
  for (const value of xs.length ? ticks(low, low + span, width / 90) : []) {
    rule(x(value), y(0), x(value), y(top));
    pen.fillText(inWords(value), x(value), height - 2);
  }
  return [x, y];
}

function line(pen, points, name) {
  pen.strokeStyle = color(name);
  pen.lineWidth = 1.6;
  pen.beginPath();
  let isDrawn = false;
  for (const [x, y] of points) {
    if (y === null) isDrawn = false;
    else {
      if (isDrawn) pen.lineTo(x, y);
      else pen.moveTo(x, y);
      isDrawn = true;
    }
  }
  pen.stroke();
}

/** Lines over time. */
export function lines(box, title, names) {
  let times = [];
  let values = [];
  const show = picture(box, (pen, width, height) => {
    const most = Math.max(0, ...values.flat().filter(Number.isFinite));
    const [x, y] = axes(pen, width, height, times, most, (s) => (s === 0 ? "now" : `${short(s)} s`));
    values.forEach((each, i) => line(pen, each.map((v, j) => [x(times[j]), Number.isFinite(v) ? y(v) : null]), COLORS[i]));
  });
  if (names.length > 1) legend(box, names);
  return (latest) => {
    [times, ...values] = latest;
    const now = values.map((each, i) => `${names[i]} ${each.length ? Number(each.at(-1)).toPrecision(3) : "unknown"}`);
    show(`${title}: ${now.join(", ")}`);
  };
}

/** The learned cost of a batch by its size, with the measured points. */
export function curve(box, title) {
  let cost = { sizes: [], seconds: [], measured: [] };
  const show = picture(box, (pen, width, height) => {
    const { sizes } = cost;
    const measured = cost.measured.filter(([size]) => sizes.includes(size));
    const most = 1000 * Math.max(0, ...cost.seconds, ...measured.map(([, seconds]) => seconds));
    const [x, y] = axes(pen, width, height, sizes, most, short);
    line(pen, sizes.map((size, i) => [x(size), y(1000 * cost.seconds[i])]), "one");
    pen.fillStyle = color("two");
    for (const [size, seconds] of measured) {
      pen.beginPath();
      pen.arc(x(size), y(1000 * seconds), 2.5, 0, 2 * Math.PI);
      pen.fill();
    }
  });
  legend(box, ["learned", "measured"]);
  return (latest) => {
    box.parentElement.hidden = latest === null;
    if (latest === null) return;
    cost = latest;
    const of = (seconds) => (1000 * seconds).toPrecision(3);
    show(`${title}: ${of(cost.seconds[0])} for one, ${of(cost.seconds.at(-1))} for ${cost.sizes.at(-1)}`);
  };
}

/** How many batches had each size, second by second: darker is more. */
export function heat(box, title) {
  let latest = [];
  let largest = 1;
  const show = picture(box, (pen, width, height) => {
    const rows = Math.min(largest, 32);
    const row = (size) => Math.min(rows - 1, Math.floor(((size - 1) / largest) * rows));
    const cells = latest.map((sizes) => {
      const column = new Array(rows).fill(0);
      for (const [size, n] of sizes) column[row(size)] += n;
      return column;
    });
    const most = Math.max(1, ...cells.flat());
    const wide = (width - 34) / Math.max(60, cells.length);
    const high = height / rows;
    pen.fillStyle = color("one");
    cells.forEach((column, i) => column.forEach((n, r) => {
      if (n === 0) return;
      pen.globalAlpha = 0.15 + 0.85 * (n / most);
      pen.fillRect(width - (cells.length - i) * wide, height - (r + 1) * high, wide, high);
    }));
    pen.globalAlpha = 1;
    pen.fillStyle = color("soft");
    pen.fillText(String(largest), 4, 13);
    pen.fillText("1", 4, height - 4);
  });
  box.firstElementChild.classList.add("heat");
  return (columns) => {
    latest = columns;
    largest = Math.max(1, ...latest.flat().map(([size]) => size));
    show(`${title}: the largest was ${largest}`);
  };
}
