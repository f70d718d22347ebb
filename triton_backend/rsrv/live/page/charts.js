// Small charts of a server: rate, latency, device time, and the share of requests that found their weights.
import { $, clock, make, minute, percent, rate, say, seconds } from "./base.js";
import { servers } from "./servers.js";

const RANGES = { "5 min": [300, 60], "1 h": [3600, 120], "24 h": [86400, 144] }; // seconds, and most points
const [WIDTH, HEIGHT] = [300, 64];
/** Columns of a point: t, rate, errors, p50, p99, busy, hits. */
const CHARTS = [
  { title: "requests/s", lines: [[1, ""], [2, "failed"]], show: rate },
  { title: "latency", lines: [[3, "p50"], [4, "p99"]], show: seconds },
  { title: "device busy", lines: [[5, ""]], show: percent, top: 1 },
  { title: "weights found on device", lines: [[6, ""]], show: percent, top: 1 },
];
let range = "5 min";

const svg = (tag, attributes) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
};

export function takePoint(server, [name, point]) {
  const points = (server.charts[name] ??= []);
  points.push(point);
  if (points.length > (RANGES[name]?.[1] ?? 0)) points.shift();
}

function chosen() {
  const names = [...servers.keys()].sort();
  $("chart-server-label").hidden = names.length < 2;
  const select = $("chart-server");
  if ([...select.options].map((one) => one.value).join() !== names.join()) {
    const before = select.value;
    select.replaceChildren(...names.map((name) => make("option", { value: name, textContent: name })));
    if (names.includes(before)) select.value = before;
  }
  return servers.get(select.value);
}

export function drawCharts() {
  const points = chosen()?.charts[range] ?? [];
  for (const chart of CHARTS) drawChart(chart, points);
}

function drawChart(chart, points) {
  const [length, most] = RANGES[range], end = points.at(-1)?.[0] ?? 0;
  const values = chart.lines.flatMap(([column]) => points.map((point) => point[column])).filter((one) => one != null);
  const top = chart.top ?? Math.max(...values, 1e-9);
  const x = (t) => WIDTH * (1 - (end - t) / length), y = (value) => HEIGHT - 2 - (HEIGHT - 6) * (value / top);
  chart.lines.forEach(([column], at) => {
    let path = "", last = null;
    if (at && !points.some((point) => point[column])) return chart.paths[at].setAttribute("d", "");
    for (const point of points) {
      const value = point[column];
      // Leave a gap where the server was silent.
      const joined = last != null && Math.abs(point[0] - last) < (2.5 * length) / most;
      if (value != null) path += `${joined ? "L" : "M"}${x(point[0]).toFixed(1)} ${y(value).toFixed(1)}${joined ? "" : "h.1"}`;
      last = value == null ? null : point[0];
    }
    chart.paths[at].setAttribute("d", path);
  });
  say(chart.top_, values.length ? chart.show(top) : "");
  chart.times.forEach((time, at) => say(time, end ? minute(end - length * (1 - at / 2)) : ""));
  chart.points = points;
  const latest = points.at(chart.hovered ?? -1);
  const figures = latest ? chart.lines.filter(([column], at) => !at || latest[column]).map(([column, name]) => `${name} ${chart.show(latest[column])}`.trim()).join(", ") : "–";
  say(chart.value, (chart.hovered == null || !latest ? "" : `${clock(latest[0])}: `) + figures);
  chart.svg.setAttribute("aria-label", `${chart.title} of the last ${range}: now ${figures}, at most ${chart.show(values.length ? Math.max(...values) : null)}`);
}

export function beginCharts() {
  for (const chart of CHARTS) {
    chart.svg = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    chart.paths = chart.lines.map((_, at) => svg("path", { class: `line${at}`, "vector-effect": "non-scaling-stroke" }));
    chart.svg.append(...chart.paths);
    [chart.value, chart.top_, chart.times] = [make("b"), make("small"), [0, 1, 2].map(() => make("time"))];
    chart.svg.addEventListener("pointermove", (event) => {
      const box = chart.svg.getBoundingClientRect();
      const t = (chart.points?.at(-1)?.[0] ?? 0) - RANGES[range][0] * (1 - (event.clientX - box.left) / box.width);
      const near = (chart.points ?? []).map((point, at) => [Math.abs(point[0] - t), at]).sort((a, b) => a[0] - b[0])[0];
      chart.hovered = near?.[1] ?? null;
      drawCharts();
    });
    chart.svg.addEventListener("pointerleave", () => { chart.hovered = null; drawCharts(); });
    $("charts").append(make("figure", {}, make("figcaption", {}, `${chart.title} `, chart.value), make("div", { className: "plot" }, chart.svg, chart.top_), make("div", { className: "times" }, ...chart.times)));
  }
  for (const name of Object.keys(RANGES)) {
    const button = make("button", { type: "button", textContent: name, ariaPressed: String(name === range) });
    button.addEventListener("click", () => {
      range = name;
      for (const one of $("ranges").children) one.ariaPressed = String(one === button);
      drawCharts();
    });
    $("ranges").append(button);
  }
  $("chart-server").addEventListener("input", drawCharts);
  drawCharts();
}
