// Charts over the vendored uPlot, and a heat map of batch sizes on a canvas.
const uPlot = window.uPlot; // the page loads it before

const HEIGHT = 170;
const dark = matchMedia("(prefers-color-scheme: dark)");
const restyled = [];
dark.addEventListener("change", () => restyled.forEach((restyle) => restyle()));

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function axes(isTime) {
  const axis = { stroke: () => color("soft"), grid: { stroke: () => color("line"), width: 1 }, ticks: { stroke: () => color("line") } };
  const x = isTime ? { ...axis, values: (_, splits) => splits.map((s) => (s === 0 ? "now" : `${s} s`)) } : axis;
  const wide = (values) => 20 + 7 * Math.max(...values.map((value) => value.length));
  return [x, { ...axis, size: (_, values) => Math.max(52, values ? wide(values) : 0) }];
}

function plot(box, series, isTime) {
  const options = {
    width: Math.max(box.clientWidth, 100),
    height: HEIGHT - 30,
    cursor: { y: false },
    legend: { show: series.length > 1, live: false },
    scales: { x: { time: false }, y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
    axes: axes(isTime),
    series: [{}, ...series],
  };
  const made = new uPlot(options, [[], ...series.map(() => [])], box);
  new ResizeObserver(() => made.setSize({ width: Math.max(box.clientWidth, 100), height: HEIGHT - 30 })).observe(box);
  restyled.push(() => {
    made.redraw();
    const markers = [...made.root.querySelectorAll(".u-marker")].slice(-series.length);
    markers.forEach((marker, i) => (marker.style.borderColor = series[i].stroke()));
  });
  return made;
}

function finite(values) {
  return values.map((value) => (Number.isFinite(value) ? value : null));
}

/** Lines over time. */
export function lines(box, title, names) {
  const colors = ["one", "two", "three"];
  const made = plot(box, names.map((label, i) => ({ label, stroke: () => color(colors[i]), width: 1.6, points: { show: false } })), true);
  box.setAttribute("role", "img");
  return ([times, ...values]) => {
    made.setData([times, ...values.map(finite)]);
    const now = values.map((each, i) => `${names[i]} ${each.length ? Number(each.at(-1)).toPrecision(3) : "unknown"}`);
    box.setAttribute("aria-label", `${title}: ${now.join(", ")}`);
  };
}

/** The learned cost of a batch by its size, with the measured points. */
export function curve(box, title) {
  const made = plot(box, [
    { label: "learned", stroke: () => color("one"), width: 1.6, points: { show: false } },
    { label: "measured", stroke: () => color("two"), paths: () => null, points: { show: true, size: 5, fill: () => color("two") } },
  ], false);
  box.setAttribute("role", "img");
  return (cost) => {
    box.parentElement.hidden = cost === null;
    if (cost === null) return;
    const measured = new Map(cost.measured.map(([n, seconds]) => [n, 1000 * seconds]));
    made.setData([cost.sizes, cost.seconds.map((s) => 1000 * s), cost.sizes.map((n) => measured.get(n) ?? null)]);
    box.setAttribute("aria-label", `${title}: ${(1000 * cost.seconds[0]).toPrecision(3)} for one, ${(1000 * cost.seconds.at(-1)).toPrecision(3)} for ${cost.sizes.at(-1)}`);
  };
}

/** How many batches had each size, second by second: darker is more. */
export function heat(box, title) {
  const canvas = document.createElement("canvas");
  canvas.className = "heat";
  canvas.setAttribute("role", "img");
  box.append(canvas);
  let latest = [];
  const draw = () => {
    const scale = devicePixelRatio;
    canvas.width = canvas.clientWidth * scale;
    canvas.height = canvas.clientHeight * scale;
    const pen = canvas.getContext("2d");
    pen.clearRect(0, 0, canvas.width, canvas.height);
    const largest = Math.max(1, ...latest.flat().map(([size]) => size));
    const rows = Math.min(largest, 32);
    const row = (size) => Math.min(rows - 1, Math.floor(((size - 1) / largest) * rows));
    const cells = latest.map((sizes) => {
      const column = new Array(rows).fill(0);
      for (const [size, n] of sizes) column[row(size)] += n;
      return column;
    });
    const most = Math.max(1, ...cells.flat());
    const left = 34 * scale;
    const width = (canvas.width - left) / Math.max(60, cells.length);
    const height = canvas.height / rows;
    pen.fillStyle = color("one");
    cells.forEach((column, i) => column.forEach((n, r) => {
      if (n === 0) return;
      pen.globalAlpha = 0.15 + 0.85 * (n / most);
      const x = canvas.width - (cells.length - i) * width;
      pen.fillRect(x, canvas.height - (r + 1) * height, Math.ceil(width), Math.ceil(height));
    }));
    pen.globalAlpha = 1;
    pen.fillStyle = color("soft");
    pen.font = `${11 * scale}px system-ui, sans-serif`;
    pen.fillText(String(largest), 4 * scale, 13 * scale);
    pen.fillText("1", 4 * scale, canvas.height - 4 * scale);
    canvas.setAttribute("aria-label", `${title}: the largest was ${largest}`);
  };
  restyled.push(draw);
  new ResizeObserver(draw).observe(canvas);
  return (columns) => {
    latest = columns;
    draw();
  };
}
