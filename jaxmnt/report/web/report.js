// Draws the page of a report from the JSON in it. Texts are inserted as text, never as markup.
"use strict";

const AXIS_FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
const DASHES = [[], [7, 4], [2, 3], [10, 4, 2, 4]];
const MARKS = {
  restart: ["#", "restart"], bad_step: ["x", "bad step"], loss_spike: ["^", "loss spike"],
  straggler: ["o", "straggler"], slow_device: ["o", "slow device"], checkpoint_failed: ["!", "save failed"],
  checkpoint_damaged: ["!", "checkpoint damaged"], replicas_differ: ["!", "replicas differ"],
  rows_skipped: ["-", "rows skipped"],
  host_fault: ["!", "host fault"], router_collapse: ["^", "router collapse"],
};
const zoomed = {};  // chart id → [first step, last step] that the user zoomed to
const hidden = {};  // chart id → names of series that the user switched off
const pressed = {};  // chart id → name of a button of the chart → true if it is pressed
let drawn = [];
let newest = null;
let sought = "";  // the search text in the config

// Helpers.

function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === "class") made.className = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function drawing(name, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function short(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e15)) return value.toExponential(2);
  for (const [unit, name] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) return `${Number((unit === 1e4 ? value / 1e3 : value / unit).toPrecision(digits))}${name}`;
  }
  return String(Number(value.toPrecision(digits)));
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.0995) return `${Number((1e3 * seconds).toPrecision(2))} ms`;
  if (seconds < 100) return `${Number(seconds.toPrecision(3))} s`;
  const minutes = Math.round(seconds / 60), hours = Math.floor(minutes / 60), days = Math.floor(hours / 24);
  if (hours < 1) return minutes < 10 ? `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s` : `${minutes} min`;
  return days < 3 ? `${hours} h ${minutes % 60} min` : `${days} d ${hours % 24} h`;
}

function percent(share) {
  return share === null || share === undefined ? "–" : `${(100 * share).toFixed(1)} %`;
}

function money(cost) {
  return cost === null || cost === undefined ? "–" : cost.toLocaleString("en", cost < 1 ? { maximumSignificantDigits: 2 } : { maximumFractionDigits: 2 });
}

function moment(seconds) {
  if (!(Math.abs(seconds) < 8e12)) return "–";
  return new Date(1e3 * seconds).toISOString().replace("T", " ").slice(0, 19) + " UTC";
}

function plain(value) {
  if (value === null || value === undefined) return "–";
  return typeof value === "string" ? value : JSON.stringify(value);
}

function table(caption, heads, rows, numbers = []) {
  const kind = (place) => (numbers.includes(place) ? "number" : "wrap");
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    element("table", {}, element("caption", {}, caption),
      element("thead", {}, element("tr", {}, ...heads.map((head, place) =>
        element("th", { scope: "col", class: numbers.includes(place) ? "number" : "" }, head)))),
      element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((cell, place) =>
        element("td", { class: kind(place) }, cell instanceof Node ? cell : String(cell))))))));
}

// Parts of the page.

function heading(run) {
  const { summary, goodput } = run;
  const tiles = [
    ["State", run.state], ["Step", summary.steps ? `${summary.step} of ${summary.steps}` : summary.step],
    ["Loss", short(summary.loss)], ["Held-out loss", short(summary.held_out_loss)],
    ["Held-out bits per byte", short(summary.bits_per_byte)],
    ["Exact match", percent(summary.exact_match)],
    ["Tokens", short(summary.tokens)], ["Tokens/s", short(summary.tokens_per_second)],
    ["Step time", duration(summary.step_seconds)], ["MFU", percent(summary.mfu)],
    ["Wall time", duration(goodput.wall_seconds)], ["Goodput (ETTR)", percent(goodput.ettr)],
    ["ETTR, last hour", percent(goodput.ettr_last_hour)], ["Restarts", summary.restarts],
    ["Bad steps", summary.bad_steps], ["Steps without targets", summary.steps_without_targets || "–"], ["Time left", duration(summary.seconds_left)],
    ["Device-hours", short(goodput.gpu_hours)], ["Cost", money(goodput.cost)],
    ["Productive cost", money(goodput.productive_cost)],
    ["Cost per billion tokens", money(goodput.cost_per_billion_tokens)],
  ].filter(([, value]) => value !== "–");
  return element("section", { "aria-label": `Summary of ${run.run}` },
    element("h1", {}, run.run), element("p", { class: "soft" }, run.id ? `run ${run.id}` : "no id"),
    ...run.notes.map((note) => element("p", { class: "note" }, note)),
    element("div", { class: "tiles" }, ...tiles.map(([name, value]) =>
      element("div", { class: "tile" }, element("span", { class: "soft" }, name), element("b", {}, String(value))))));
}

function failuresOf(run) {
  if (!run.failures.length) return null;
  const rows = run.failures.map((failure) => [
    failure.attempt, moment(failure.time), failure.step, failure.kind.replaceAll("_", " "),
    failure.process === null ? "–" : `process ${failure.process}${failure.host ? ` on ${failure.host}` : ""}`,
    element("div", {}, element("p", {}, failure.why), failure.lines.length
      ? element("details", {}, element("summary", {}, failure.source), element("pre", {}, failure.lines.join("\n"))) : ""),
    failure.then,
    `${duration(failure.lost_seconds)}${failure.lost_steps ? `, ${failure.lost_steps} steps` : ""}` +
      `${failure.cost === null ? "" : `, cost ${money(failure.cost)}`}`,
  ]);
  return element("section", {}, element("h2", {}, "Failures"), table("Failed attempts",
    ["Attempt", "When", "After step", "What", "Where", "Why", "Next attempt", "Lost"], rows));
}

function stragglersOf(run) {
  if (!run.stragglers.length) return null;
  const rows = run.stragglers.map((straggler) => [
    `process ${straggler.process}${straggler.device === null ? "" : `, device ${straggler.device}`}`, plain(straggler.host), straggler.phase,
    `${straggler.from_step} to ${straggler.to_step === null ? "the end" : straggler.to_step}`,
    straggler.slower_seconds ? `${duration(straggler.slower_seconds)}` +
      (straggler.step_seconds ? ` (${percent(straggler.slower_seconds / straggler.step_seconds)} of a step)` : "") : plain(straggler.why),
  ]);
  return element("section", {}, element("h2", {}, "Stragglers"),
    table("Processes and devices that slowed the others down", ["Process", "Host", "Phase", "Steps", "By how much"], rows));
}

function adviceOf(run) {
  if (!run.advice.length) return null;
  const rows = run.advice.map((entry) => [entry.rule, entry.evidence, entry.do, entry.share ? percent(entry.share) : "–"]);
  return element("section", { id: "advice" }, element("h2", {}, "Advice"),
    table("What could be better", ["Rule", "Evidence", "What to do", "Approximate share of the time"], rows, [3]));
}

function scalingOf(run) {
  if (!run.scaling) return null;
  const two = (value) => (value === null ? "–" : value.toFixed(2));
  const phasesText = (point) => Object.entries(point.phases).filter(([, seconds]) => seconds > 0.005 * point.typical)
    .sort((a, b) => b[1] - a[1]).map(([phase, seconds]) => `${phase.replaceAll("_", " ")} ${duration(seconds)}`).join(", ");
  const tables = run.scaling.scalings.map((scaling) => table(`${scaling.mode} scaling: ${scaling.meaning}`,
    ["Processes", "Devices", "Rows", "Step", "Tokens/s", "Efficiency", "Over rounds", "Predicted", "Predicted efficiency", "Where a step goes"],
    scaling.points.map((point) => [point.processes, point.devices, point.rows, duration(point.typical),
      short(point.tokens_per_second), two(point.efficiency),
      `${two(Math.min(...point.efficiencies))} to ${two(Math.max(...point.efficiencies))}`,
      point.predicted === null ? "–" : duration(point.predicted), two(point.predicted_efficiency), phasesText(point)]), [0, 1, 2, 3, 4, 5, 6, 7, 8]));
  return element("section", { id: "scaling" }, element("h2", {}, "Scaling"),
    element("p", { class: "soft" }, `Measured on ${run.scaling.date}: speed of a device, relative to the first line.`),
    ...run.scaling.warnings.map((text) => element("p", { class: "note" }, text)), ...tables);
}

function samplesOf(run) {
  if (!run.samples.length) return null;
  const written = (entry) => entry.samples.map((sample) =>
    element("pre", {}, element("b", {}, sample.prompt), sample.text));
  const [newest, ...earlier] = run.samples;
  return element("section", { id: "samples" }, element("h2", {}, "Samples"),
    element("p", { class: "soft" }, `What the model wrote after step ${newest.step}; the prompts are bold.`),
    ...written(newest),
    ...earlier.map((entry) => element("details", {}, element("summary", {}, `step ${entry.step}`), ...written(entry))));
}

function goodputOf(run) {
  const { seconds, wall_seconds: wall, parts } = run.goodput;
  const shares = Object.entries(seconds).filter(([, value]) => value > 0).sort((a, b) => b[1] - a[1]);
  const bar = drawing("svg", { viewBox: "0 0 1000 34", height: "34", width: "100%", preserveAspectRatio: "none",
    role: "img", "aria-label": "Shares of the wall time; the table has the numbers" });
  let left = 0;
  shares.forEach(([, value], place) => {
    const width = (1000 * value) / wall;
    bar.append(drawing("rect", { x: left, y: 0, width, height: 34, fill: color(`c${place % 9}`) }));
    left += width;
  });
  const swatch = (place) => {
    const square = drawing("svg", { width: 12, height: 12, "aria-hidden": "true" });
    square.append(drawing("rect", { width: 12, height: 12, fill: color(`c${place % 9}`) }));
    return square;
  };
  const rows = shares.map(([part, value], place) => [
    element("span", {}, swatch(place), ` ${part.replaceAll("_", " ")}`), percent(value / wall), duration(value),
    run.goodput.cost !== null && part !== "between" && wall > seconds.between
      ? money((run.goodput.cost * value) / (wall - seconds.between)) : "–", parts[part] || ""]);
  return element("section", {}, element("h2", {}, "Goodput and cost"), bar,
    table("Parts of the wall time", ["Part", "Share", "Time", "Cost", "What it is"], rows, [1, 2, 3]));
}

function attemptsOf(run) {
  const rows = run.attempts.map((attempt) => [
    attempt.attempt, moment(attempt.began), duration(attempt.ended - attempt.began),
    attempt.first_step === null ? "none" : `${attempt.first_step} to ${attempt.last_step}`, attempt.lost_steps, attempt.devices,
    attempt.end === "end" ? (attempt.finished ? "finished" : "stopped with a checkpoint")
      : attempt.end === null ? "ended abruptly" : attempt.end.replaceAll("_", " "),
  ]);
  return element("section", {}, element("h2", {}, "Attempts and events"), timeline(run),
    table("Attempts", ["Attempt", "Began", "Took", "Steps", "Repeated", "Devices", "End"], rows));
}

function timeline(run) {
  const holder = element("div", { class: "chart" });
  const first = run.attempts[0].began, last = Math.max(...run.attempts.map((attempt) => attempt.ended));
  const kinds = [...new Set(run.timeline.map((event) => event.kind))];
  const row = 20, labels = 130;
  const draw = () => {
    const width = Math.max(280, holder.clientWidth - 20), room = width - labels - 10;
    const at = (time) => labels + (room * (time - first)) / Math.max(1e-9, last - first);
    const height = row * (kinds.length + 2);
    const image = drawing("svg", { width, height, role: "img",
      "aria-label": `Timeline of ${run.attempts.length} attempts and ${run.timeline.length} events` });
    const label = (text, y) => image.append(drawing("text", { x: 0, y: y + 14 }, document.createTextNode(text)));
    label("attempts", 0);
    run.attempts.forEach((attempt) => {
      const bar = drawing("rect", { x: at(attempt.began), y: 3, height: row - 6, rx: 2, fill: color("c0"),
        width: Math.max(2, at(attempt.ended) - at(attempt.began) - 1) });
      bar.append(drawing("title", {}, document.createTextNode(`attempt ${attempt.attempt}`)));
      image.append(bar);
    });
    kinds.forEach((kind, place) => {
      label(kind.replaceAll("_", " "), row * (place + 1));
      image.append(drawing("line", { x1: labels, x2: width - 10, stroke: color("grid"),
        y1: row * (place + 1.5), y2: row * (place + 1.5) }));
      run.timeline.filter((event) => event.kind === kind).forEach((event) => {
        const dot = drawing("circle", { cx: at(event.time), cy: row * (place + 1.5), r: 4, fill: color("c1") });
        dot.append(drawing("title", {}, document.createTextNode(`${moment(event.time)}: ${event.text}`)));
        image.append(dot);
      });
    });
    const base = height - 6;
    image.append(drawing("text", { x: labels, y: base, class: "soft" }, document.createTextNode(moment(first))));
    if (room > 330) {
      image.append(drawing("text", { x: width - 10, y: base, class: "soft", "text-anchor": "end" },
        document.createTextNode(moment(last))));
    }
    holder.replaceChildren(image);
  };
  drawn.push({ resize: draw, draw });
  const list = element("details", {}, element("summary", {}, "Events as a list"), table("Events", ["When", "What"],
    run.timeline.slice(-500).map((event) => [moment(event.time), event.text])));
  return element("div", {}, holder, list);
}

function processesOf(run) {
  const { of, processes } = run.processes;
  if (!of.length) return null;
  const most = Math.max(...of.map((entry) => entry.seconds[3])), scale = (value) => (200 * value) / (most || 1);
  const rows = of.map((entry) => {
    const [low, middle, high, max] = entry.seconds;
    const image = drawing("svg", { width: 206, height: 16, role: "img",
      "aria-label": `median ${duration(middle)}, 10 % to 90 %: ${duration(low)} to ${duration(high)}` });
    image.append(
      drawing("line", { x1: scale(high), x2: scale(max), y1: 8, y2: 8, stroke: color("soft") }),
      drawing("rect", { x: scale(low), y: 3, width: Math.max(1, scale(high) - scale(low)), height: 10, fill: color("c5") }),
      drawing("rect", { x: scale(middle) - 1, y: 1, width: 3, height: 14, fill: color("ink") }));
    return [entry.process, plain(entry.host), image, ...entry.seconds.map(duration)];
  });
  return element("section", {}, element("h2", {}, "Work of each process"),
    element("p", { class: "soft" }, "Time per step in which a process does its own work and does not wait: reading " +
      "input, copying, starting steps, saving, other work on the host. The step time is the same in all processes."),
    table(`The ${of.length} of ${processes} that work longest`,
      ["Process", "Host", "10 % – median – 90 %, longest", "10 %", "Median", "90 %", "Longest"], rows, [3, 4, 5, 6]));
}

function configOf(runs, differences) {
  const parts = [];
  if (runs.length > 1) {
    parts.push(element("h2", {}, "Differences between the configs"), differences.length
      ? table("Keys whose values differ", ["Key", ...runs.map((run) => run.label)],
        differences.map((difference) => [difference.key, ...difference.values.map(plain)]))
      : element("p", {}, "Only the run directory differs."));
  }
  for (const run of runs) {
    const named = runs.length > 1 ? `: ${run.label}` : "";
    if (run.changes.length) {
      parts.push(element("h2", {}, `Changes of the config${named}`), table("Between attempts",
        ["Attempt", "Key", "Before", "After", "Class"],
        run.changes.map((change) => [change.attempt, change.key, plain(change.before), plain(change.now), plain(change.resume)])));
    }
    parts.push(element("h2", {}, `Config${named}`), settings("Config", run.config),
      Object.keys(run.environment).length ? element("h2", {}, `Environment${named}`) : "", !Object.keys(run.environment).length ? "" : table("Of the last start", ["What", "Value"],
        Object.entries(run.environment).map(([name, value]) => [name.replaceAll("_", " "), plain(value)])));
  }
  return element("section", { id: "config" }, ...parts);
}

function settings(caption, values) {
  const entries = Object.entries(values);
  const holder = element("div", {});
  const show = (part) => holder.replaceChildren(table(`${caption}: ${entries.length} settings`, ["Key", "Value"],
    entries.filter(([key]) => key.includes(part)).map(([key, value]) => [key, plain(value)])));
  show(sought);
  const search = element("input", { type: "search", placeholder: "part of a key", "aria-label": "Find a setting",
    value: sought, oninput: (event) => { sought = event.target.value.trim(); show(sought); } });
  return element("details", {}, element("summary", {}, "Show"), search, holder);
}

// Charts.

// Overlays the charts of several runs that have the same id, except stacks. A run has the same colour in all charts, and
// its lines differ by their dashes.
function chartsOf(runs) {
  const together = new Map();
  for (const [number, run] of runs.entries()) {
    for (const chart of run.charts) {
      const key = chart.style === "stack" && runs.length > 1 ? `${chart.id} ${run.label}` : chart.id;
      const title = chart.style === "stack" && runs.length > 1 ? `${chart.title}: ${run.label}` : chart.title;
      if (!together.has(key)) together.set(key, { ...chart, key, title, tables: [], marks: [] });
      const merged = together.get(key);
      const shared = runs.length > 1 && chart.style !== "stack";
      for (const [place, series] of chart.series.entries()) {
        const name = shared ? `${run.label}: ${series.name}` : series.name;
        merged.tables.push({ ...series, name, steps: chart.steps, color: `c${(shared ? number : place) % 9}`, dash: DASHES[place % 4] });
      }
      if (runs.length === 1) merged.marks = run.marks;
    }
  }
  return [...together.values()];
}

// Returns the steps of all series, and the values of each series at these steps.
function aligned(tables) {
  const steps = [...new Set(tables.flatMap((series) => series.steps))].sort((a, b) => a - b);
  const indexOf = new Map(steps.map((step, index) => [step, index]));
  const columns = tables.map((series) => {
    const column = new Array(steps.length).fill(undefined);  // uPlot joins over undefined, and breaks at null
    series.steps.forEach((step, index) => { column[indexOf.get(step)] = series.values[index]; });
    return column;
  });
  return [steps, columns];
}

// Returns the indices of isolated values: those between two gaps, which no line reaches.
function alone(column) {
  const gap = (place) => place < 0 || place >= column.length || column[place] === null;
  return [...column.keys()].filter((place) => !gap(place) && column[place] !== undefined && gap(place - 1) && gap(place + 1));
}

function stacked(columns) {
  const sums = columns[0].map(() => 0);
  return columns.map((column) => column.map((value, index) => {
    if (value === null || value === undefined) return null;
    sums[index] += value;
    return sums[index];
  }));
}

function description(chart, columns, steps) {
  const texts = chart.tables.map((series, place) => {
    const points = columns[place].map((value, index) => [value, steps[index]]).filter(([value]) => value !== null && value !== undefined);
    if (!points.length) return "";
    const [first, last] = [points[0], points[points.length - 1]];
    const least = points.reduce((a, b) => (b[0] < a[0] ? b : a));
    const most = points.reduce((a, b) => (b[0] > a[0] ? b : a));
    return `${series.name}: ${short(first[0])} at step ${first[1]}, ${short(last[0])} at step ${last[1]}, ` +
      `lowest ${short(least[0])} at ${least[1]}, highest ${short(most[0])} at ${most[1]}`;
  });
  return `${chart.title}${chart.unit ? ` in ${chart.unit}` : ""}. ${texts.join("; ")}. Arrow keys read values, plus and minus zoom, 0 shows all.`;
}

function chartCard(chart) {
  const [steps, columns] = aligned(chart.tables);
  const stack = chart.style === "stack", off = hidden[chart.key] || (hidden[chart.key] = new Set());
  const plot = element("div", { class: "plot", tabindex: "0", role: "img", "aria-label": description(chart, columns, steps) });
  const readout = element("div", { class: "readout", "aria-live": "polite" });
  const legend = element("div", { class: "legend" });
  const numbers = columns.flat().filter((value) => value !== null && value !== undefined);
  const positive = numbers.every((value) => value > 0);
  const top = chart.ceiling;
  const down = pressed[chart.key] || (pressed[chart.key] = {});
  const toggle = (name) => element("button", { "aria-pressed": String(!!down[name]), onclick: (event) => {
    down[name] = !down[name];
    event.target.setAttribute("aria-pressed", String(down[name]));
    draw();
  } }, name);
  const card = element("article", { class: "chart", "data-chart": chart.id },
    element("header", {}, element("div", {}, element("h3", {}, chart.title, element("span", { class: "soft" }, chart.unit ? ` ${chart.unit}` : "")),
      element("p", { class: "soft" }, chart.what)),
    element("div", { class: "buttons" }, top === null ? null : toggle("whole height"),
      chart.log && positive ? toggle("log") : null)), plot, readout, legend);
  let shown = null;

  const say = (index) => {
    if (index === null || index === undefined) { readout.textContent = ""; return; }
    const texts = chart.tables.map((series, place) => [series.name, columns[place][index], place])
      .filter(([, value, place]) => value !== null && value !== undefined && !off.has(chart.tables[place].name))
      .map(([name, value]) => `${name} ${short(value)}`);
    readout.textContent = `step ${steps[index]}: ${texts.join(" · ")}`;
  };

  const draw = () => {
    if (shown) shown.destroy();
    const log = !!down.log && positive;
    const ceiling = down["whole height"] ? null : top;
    const visible = columns.map((column, place) => (off.has(chart.tables[place].name) ? column.map(() => null) : column));
    const data = [steps, ...(stack ? stacked(visible) : visible)];
    const axis = { stroke: color("soft"), font: AXIS_FONT, grid: { stroke: color("grid"), width: 1 },
      ticks: { stroke: color("grid"), width: 1 } };
    const bands = stack ? chart.tables.slice(1).map((_, place) => ({ series: [place + 2, place + 1] })) : [];
    shown = new uPlot({
      width: Math.max(240, plot.clientWidth), height: 250, legend: { show: false }, bands,
      cursor: { sync: { key: "steps" }, points: { size: 6 }, drag: { x: true, y: false, setScale: true } },
      scales: { x: { time: false }, y: { distr: log ? 3 : 1, range: log ? undefined : (_, low, high) => inView(low, high, stack, ceiling) } },
      axes: [{ ...axis, values: (_, ticks) => ticks.map((tick) => short(tick)) },
        { ...axis, size: 62, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : short(tick))) }],
      series: [{}, ...chart.tables.map((line) => ({
        label: line.name, stroke: color(line.color), width: stack ? 1 : 1.6, dash: stack ? [] : line.dash,
        fill: stack ? color(line.color) : undefined, show: !off.has(line.name), spanGaps: false,
        points: { show: line.points || steps.length < 2, size: 7, fill: color(line.color),
          filter: (_, series, all) => (all ? null : alone(data[series])) },
      }))],
      hooks: {
        setCursor: [(self) => { if (self === shown) say(self.cursor.idx); }],
        draw: [(self) => drawMarks(self, chart.marks)],
        setScale: [(self, key) => {
          if (key !== "x" || self !== shown) return;
          const { min, max } = self.scales.x;
          zoomed[chart.key] = min > steps[0] || max < steps[steps.length - 1] ? [min, max] : undefined;
        }],
      },
    }, data, plot);
    const view = zoomed[chart.key];
    if (view) shown.setScale("x", { min: view[0], max: view[1] });
  };

  plot.addEventListener("keydown", (event) => {
    const { min, max } = shown.scales.x, middle = (min + max) / 2, half = (max - min) / 2;
    const now = shown.cursor.idx ?? -1, jump = event.shiftKey ? Math.max(1, Math.round(steps.length / 20)) : 1;
    const go = (index) => {
      const at = Math.min(steps.length - 1, Math.max(0, index));
      shown.setCursor({ left: shown.valToPos(steps[at], "x"), top: 10 });
      say(at);
    };
    if (event.key === "ArrowRight") go(now + jump);
    else if (event.key === "ArrowLeft") go(now - jump);
    else if (event.key === "Home") go(0);
    else if (event.key === "End") go(steps.length - 1);
    else if (event.key === "+" || event.key === "=") shown.setScale("x", { min: middle - half / 2, max: middle + half / 2 });
    else if (event.key === "-") shown.setScale("x", {
      min: Math.max(steps[0], middle - 2 * half), max: Math.min(steps[steps.length - 1], middle + 2 * half) });
    else if (event.key === "0" || event.key === "Escape") shown.setScale("x", { min: steps[0], max: steps[steps.length - 1] });
    else return;
    event.preventDefault();
  });

  chart.tables.forEach((series) => {
    const sample = drawing("svg", { width: 24, height: 10, "aria-hidden": "true" });
    sample.append(stack || series.points
      ? drawing("rect", { x: 7, width: 10, height: 10, fill: color(series.color) })
      : drawing("line", { x1: 0, x2: 24, y1: 5, y2: 5, stroke: color(series.color), "stroke-width": 2.5,
        "stroke-dasharray": series.dash.join(" ") }));
    legend.append(element("button", { "aria-pressed": String(!off.has(series.name)), onclick: (event) => {
      if (off.has(series.name)) off.delete(series.name); else off.add(series.name);
      event.currentTarget.setAttribute("aria-pressed", String(!off.has(series.name)));
      draw();
    } }, sample, series.name));
  });
  const kinds = [...new Set(chart.marks.map((mark) => mark.kind))].filter((kind) => MARKS[kind]);
  if (kinds.length) {
    legend.append(element("span", { class: "soft" }, kinds.map((kind) => `${MARKS[kind][0]} ${MARKS[kind][1]}`).join("  ")));
  }
  drawn.push({ draw, destroy: () => shown && shown.destroy(), resize: () => shown && shown.setSize({ width: Math.max(240, plot.clientWidth), height: 250 }) });
  return card;
}

// Returns the range of the y axis: some margin above and below; a stack begins at 0 and ends at its ceiling.
function inView(low, high, stack, ceiling) {
  if (low === null || high === null) return [0, 1];
  if (ceiling !== null && ceiling !== undefined && high > ceiling) return [0, ceiling];
  const room = (high - low) * 0.06 || Math.abs(high) * 0.06 || 1;
  return [stack ? 0 : low >= 0 ? Math.max(0, low - room) : low - room, high + room];
}

function drawMarks(self, marks) {
  const { ctx, bbox } = self, ratio = devicePixelRatio || 1;
  const { min, max } = self.scales.x;
  ctx.save();
  ctx.font = `${12 * ratio}px monospace`;
  ctx.textAlign = "center";
  for (const mark of marks) {
    if (mark.step < min || mark.step > max || !MARKS[mark.kind]) continue;
    const x = self.valToPos(mark.step, "x", true);
    const restart = mark.kind === "restart";
    ctx.strokeStyle = ctx.fillStyle = color(restart ? "soft" : "bad");
    ctx.lineWidth = ratio;
    ctx.setLineDash(restart ? [4 * ratio, 4 * ratio] : []);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top + (restart ? 0 : bbox.height - 6 * ratio));
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.fillText(MARKS[mark.kind][0], x, bbox.top + (restart ? 11 : bbox.height / ratio - 9) * ratio);
  }
  ctx.restore();
}

// The whole page.

function render(data) {
  newest = data;
  const held = document.activeElement && document.activeElement.closest("[data-chart]");
  for (const part of drawn) if (part.destroy) part.destroy();
  drawn = [];
  const runs = data.runs;
  const grid = element("div", { class: "charts" }, ...chartsOf(runs).map(chartCard));
  const links = [["charts", "Charts"], ["time", "Time and cost"], ["config", "Config"]];
  document.getElementById("report").replaceChildren(
    ...runs.map(heading), ...data.notes.map((note) => element("p", { class: "note" }, note)),
    element("nav", { "aria-label": "Parts of the report" }, ...links.map(([id, name]) => element("a", { href: `#${id}` }, name))),
    ...runs.flatMap((run) => [failuresOf(run), stragglersOf(run), adviceOf(run)].filter(Boolean).map((part) => titled(part, run, runs))),
    element("section", { id: "charts" }, element("h2", {}, "Charts"),
      element("p", { class: "soft" }, "Drag to zoom, double click to reset; or use the keyboard: arrows, + − 0."), grid),
    element("div", { id: "time" }, ...runs.flatMap((run) =>
      [samplesOf(run), goodputOf(run), attemptsOf(run), processesOf(run), scalingOf(run)].filter(Boolean).map((part) => titled(part, run, runs)))),
    configOf(runs, data.config_differences),
    element("p", { class: "soft" }, `Made ${moment(data.made)} by jaxmnt ${data.jaxmnt} from the records of the run. ` +
      "Charts: uPlot 1.6.32 by Leon Sorokin, MIT licence."));
  redraw();
  if (held) {
    const plot = document.querySelector(`[data-chart="${CSS.escape(held.dataset.chart)}"] .plot`);
    if (plot) plot.focus({ preventScroll: true });
  }
}

function titled(part, run, runs) {
  if (runs.length > 1) part.querySelector("h2").append(`: ${run.label}`);
  return part;
}

function redraw() {
  for (const part of drawn) part.draw();
}

// Polls the server of a live report for new data, and shows it.
async function watch(seconds) {
  let version = null;
  for (;;) {
    await new Promise((done) => setTimeout(done, 1e3 * seconds));
    try {
      const answer = await fetch("data.json", { headers: version ? { "If-None-Match": version } : {} });
      if (answer.status === 200) {
        version = answer.headers.get("ETag");
        const [x, y] = [scrollX, scrollY], open = [...document.querySelectorAll("details")].map((details) => details.open);
        render(await answer.json());
        document.querySelectorAll("details").forEach((details, index) => { details.open = !!open[index]; });
        scrollTo(x, y);
      }
      document.title = document.title.replace(/ \(not reached\)$/, "");
    } catch (error) {
      if (!document.title.endsWith("(not reached)")) document.title += " (not reached)";
    }
  }
}

const report = JSON.parse(document.getElementById("data").textContent);
render(report);
let waiting = 0;
addEventListener("resize", () => {
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(() => drawn.forEach((part) => part.resize()));
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => render(newest));
if (report.watch_seconds) watch(report.watch_seconds);
