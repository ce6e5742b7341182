// The page of a report: reads the JSON in it, and draws. Texts go in as text, never as markup.
"use strict";

const AXIS_FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
const DASHES = [[], [7, 4], [2, 3], [10, 4, 2, 4]];
const MARKS = {
  restart: ["#", "restart"], bad_step: ["x", "bad step"], loss_spike: ["^", "loss spike"],
  straggler: ["o", "straggler"], slow_device: ["o", "slow device"], checkpoint_failed: ["!", "save failed"],
  checkpoint_damaged: ["!", "checkpoint damaged"], replicas_differ: ["!", "replicas differ"],
  rows_skipped: ["-", "rows skipped"],
  host_fault: ["!", "fault of a host"],
};
const zoomed = {};  // chart id → [first step, last step] that somebody looks at
const hidden = {};  // chart id → names of series that somebody has switched off
const pressed = {};  // chart id → name of a button of the chart → whether it is down
let drawn = [];
let newest = null;
let sought = "";  // in the config

// Small things.

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
    element("h1", {}, run.run), element("p", { class: "soft" }, run.id ? `run ${run.id}` : "no id is known"),
    ...run.notes.map((note) => element("p", { class: "note" }, note)),
    element("div", { class: "tiles" }, ...tiles.map(([name, value]) =>
      element("div", { class: "tile" }, element("span", { class: "soft" }, name), element("b", {}, String(value))))));
}

function failuresOf(run) {
  if (!run.failures.length) return null;
  const rows = run.failures.map((one) => [
    one.attempt, moment(one.time), one.step, one.kind.replaceAll("_", " "),
    one.process === null ? "–" : `process ${one.process}${one.host ? ` on ${one.host}` : ""}`,
    element("div", {}, element("p", {}, one.why), one.lines.length
      ? element("details", {}, element("summary", {}, one.source), element("pre", {}, one.lines.join("\n"))) : ""),
    one.then,
    `${duration(one.lost_seconds)}${one.lost_steps ? `, ${one.lost_steps} steps` : ""}` +
      `${one.cost === null ? "" : `, cost ${money(one.cost)}`}`,
  ]);
  return element("section", {}, element("h2", {}, "Failures"), table("Attempts that ended badly",
    ["Attempt", "When", "After step", "What", "Where", "Why", "What was tried next", "Lost"], rows));
}

function stragglersOf(run) {
  if (!run.stragglers.length) return null;
  const rows = run.stragglers.map((one) => [
    `process ${one.process}${one.device === null ? "" : `, device ${one.device}`}`, plain(one.host), one.phase,
    `${one.from_step} to ${one.to_step === null ? "the end" : one.to_step}`,
    one.slower_seconds ? `${duration(one.slower_seconds)}` +
      (one.step_seconds ? ` (${percent(one.slower_seconds / one.step_seconds)} of a step)` : "") : plain(one.why),
  ]);
  return element("section", {}, element("h2", {}, "Stragglers"),
    table("Who held the others up", ["Who", "Host", "Phase", "Steps", "By how much"], rows));
}

function adviceOf(run) {
  if (!run.advice.length) return null;
  const rows = run.advice.map((one) => [one.rule, one.evidence, one.do, one.share ? percent(one.share) : "–"]);
  return element("section", { id: "advice" }, element("h2", {}, "Advice"),
    table("What could be better", ["Rule", "What was seen", "What to do", "Of the time, about"], rows, [3]));
}

function scalingOf(run) {
  if (!run.scaling) return null;
  const two = (value) => (value === null ? "–" : value.toFixed(2));
  const told = (one) => Object.entries(one.phases).filter(([, seconds]) => seconds > 0.005 * one.typical)
    .sort((a, b) => b[1] - a[1]).map(([phase, seconds]) => `${phase.replaceAll("_", " ")} ${duration(seconds)}`).join(", ");
  const tables = run.scaling.scalings.map((scaling) => table(`${scaling.mode} scaling: ${scaling.meaning}`,
    ["Processes", "Devices", "Rows", "Step", "Tokens/s", "Efficiency", "Of rounds", "Predicted", "Its efficiency", "Where a step goes"],
    scaling.points.map((one) => [one.processes, one.devices, one.rows, duration(one.typical),
      short(one.tokens_per_second), two(one.efficiency),
      `${two(Math.min(...one.efficiencies))} to ${two(Math.max(...one.efficiencies))}`,
      one.predicted === null ? "–" : duration(one.predicted), two(one.predicted_efficiency), told(one)]), [0, 1, 2, 3, 4, 5, 6, 7, 8]));
  return element("section", { id: "scaling" }, element("h2", {}, "Scaling"),
    element("p", { class: "soft" }, `Measured on ${run.scaling.date}: speed of a device, compared with the first line.`),
    ...run.scaling.warnings.map((text) => element("p", { class: "note" }, text)), ...tables);
}

function samplesOf(run) {
  if (!run.samples.length) return null;
  const written = (one) => one.samples.map((sample) =>
    element("pre", {}, element("b", {}, sample.prompt), sample.text));
  const [newest, ...earlier] = run.samples;
  return element("section", { id: "samples" }, element("h2", {}, "Samples"),
    element("p", { class: "soft" }, `What the model wrote after step ${newest.step}; the prompts are bold.`),
    ...written(newest),
    ...earlier.map((one) => element("details", {}, element("summary", {}, `step ${one.step}`), ...written(one))));
}

function goodputOf(run) {
  const { seconds, wall_seconds: wall, parts } = run.goodput;
  const told = Object.entries(seconds).filter(([, value]) => value > 0).sort((one, two) => two[1] - one[1]);
  const bar = drawing("svg", { viewBox: "0 0 1000 34", height: "34", width: "100%", preserveAspectRatio: "none",
    role: "img", "aria-label": "Shares of the wall time; the table has the numbers" });
  let left = 0;
  told.forEach(([, value], place) => {
    const width = (1000 * value) / wall;
    bar.append(drawing("rect", { x: left, y: 0, width, height: 34, fill: color(`c${place % 9}`) }));
    left += width;
  });
  const swatch = (place) => {
    const square = drawing("svg", { width: 12, height: 12, "aria-hidden": "true" });
    square.append(drawing("rect", { width: 12, height: 12, fill: color(`c${place % 9}`) }));
    return square;
  };
  const rows = told.map(([part, value], place) => [
    element("span", {}, swatch(place), ` ${part.replaceAll("_", " ")}`), percent(value / wall), duration(value),
    run.goodput.cost !== null && part !== "between" && wall > seconds.between
      ? money((run.goodput.cost * value) / (wall - seconds.between)) : "–", parts[part] || ""]);
  return element("section", {}, element("h2", {}, "Goodput and cost"), bar,
    table("What the wall time went into", ["Part", "Share", "Time", "Cost", "What it is"], rows, [1, 2, 3]));
}

function attemptsOf(run) {
  const rows = run.attempts.map((one) => [
    one.attempt, moment(one.began), duration(one.ended - one.began),
    one.first_step === null ? "none" : `${one.first_step} to ${one.last_step}`, one.lost_steps, one.devices,
    one.end === "end" ? (one.finished ? "finished" : "stopped with a checkpoint")
      : one.end === null ? "without a word" : one.end.replaceAll("_", " "),
  ]);
  return element("section", {}, element("h2", {}, "Attempts and events"), timeline(run),
    table("Attempts", ["Attempt", "Began", "Took", "Steps", "Taken again", "Devices", "End"], rows));
}

function timeline(run) {
  const holder = element("div", { class: "chart" });
  const first = run.attempts[0].began, last = Math.max(...run.attempts.map((one) => one.ended));
  const kinds = [...new Set(run.timeline.map((one) => one.kind))];
  const row = 20, labels = 130;
  const draw = () => {
    const width = Math.max(280, holder.clientWidth - 20), room = width - labels - 10;
    const at = (time) => labels + (room * (time - first)) / Math.max(1e-9, last - first);
    const height = row * (kinds.length + 2);
    const image = drawing("svg", { width, height, role: "img",
      "aria-label": `Timeline of ${run.attempts.length} attempts and ${run.timeline.length} events` });
    const label = (text, y) => image.append(drawing("text", { x: 0, y: y + 14 }, document.createTextNode(text)));
    label("attempts", 0);
    run.attempts.forEach((one) => {
      const bar = drawing("rect", { x: at(one.began), y: 3, height: row - 6, rx: 2, fill: color("c0"),
        width: Math.max(2, at(one.ended) - at(one.began) - 1) });
      bar.append(drawing("title", {}, document.createTextNode(`attempt ${one.attempt}`)));
      image.append(bar);
    });
    kinds.forEach((kind, place) => {
      label(kind.replaceAll("_", " "), row * (place + 1));
      image.append(drawing("line", { x1: labels, x2: width - 10, stroke: color("grid"),
        y1: row * (place + 1.5), y2: row * (place + 1.5) }));
      run.timeline.filter((one) => one.kind === kind).forEach((one) => {
        const dot = drawing("circle", { cx: at(one.time), cy: row * (place + 1.5), r: 4, fill: color("c1") });
        dot.append(drawing("title", {}, document.createTextNode(`${moment(one.time)}: ${one.text}`)));
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
    run.timeline.slice(-500).map((one) => [moment(one.time), one.text])));
  return element("div", {}, holder, list);
}

function processesOf(run) {
  const { of, processes } = run.processes;
  if (!of.length) return null;
  const most = Math.max(...of.map((one) => one.seconds[3])), scale = (value) => (200 * value) / (most || 1);
  const rows = of.map((one) => {
    const [low, middle, high, max] = one.seconds;
    const image = drawing("svg", { width: 206, height: 16, role: "img",
      "aria-label": `median ${duration(middle)}, 10 % to 90 %: ${duration(low)} to ${duration(high)}` });
    image.append(
      drawing("line", { x1: scale(high), x2: scale(max), y1: 8, y2: 8, stroke: color("soft") }),
      drawing("rect", { x: scale(low), y: 3, width: Math.max(1, scale(high) - scale(low)), height: 10, fill: color("c5") }),
      drawing("rect", { x: scale(middle) - 1, y: 1, width: 3, height: 14, fill: color("ink") }));
    return [one.process, plain(one.host), image, ...one.seconds.map(duration)];
  });
  return element("section", {}, element("h2", {}, "Work of each process"),
    element("p", { class: "soft" }, "Time in a step that a process works for itself and waits for nobody: reading " +
      "input, copying, starting steps, saving, other work on the host. Step times are the same in all."),
    table(`The ${of.length} of ${processes} that work longest`,
      ["Process", "Host", "10 % – median – 90 %, longest", "10 %", "Median", "90 %", "Longest"], rows, [3, 4, 5, 6]));
}

function configOf(runs, differences) {
  const parts = [];
  if (runs.length > 1) {
    parts.push(element("h2", {}, "Differences between the configs"), differences.length
      ? table("Keys whose values differ", ["Key", ...runs.map((run) => run.label)],
        differences.map((one) => [one.key, ...one.values.map(plain)]))
      : element("p", {}, "None but the run directory."));
  }
  for (const run of runs) {
    const named = runs.length > 1 ? `: ${run.label}` : "";
    if (run.changes.length) {
      parts.push(element("h2", {}, `Changes of the config${named}`), table("Between attempts",
        ["Attempt", "Key", "Before", "Then", "Class"],
        run.changes.map((one) => [one.attempt, one.key, plain(one.before), plain(one.now), plain(one.resume)])));
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

// Charts of the same id of several runs lie over each other; a stack stands by itself. A run has the same colour in all
// of them, and its lines differ by their dashes.
function chartsOf(runs) {
  const together = new Map();
  for (const [number, run] of runs.entries()) {
    for (const chart of run.charts) {
      const key = chart.style === "stack" && runs.length > 1 ? `${chart.id} ${run.label}` : chart.id;
      const title = chart.style === "stack" && runs.length > 1 ? `${chart.title}: ${run.label}` : chart.title;
      if (!together.has(key)) together.set(key, { ...chart, key, title, tables: [], marks: [] });
      const one = together.get(key);
      const shared = runs.length > 1 && chart.style !== "stack";
      for (const [place, series] of chart.series.entries()) {
        const name = shared ? `${run.label}: ${series.name}` : series.name;
        one.tables.push({ ...series, name, steps: chart.steps, color: `c${(shared ? number : place) % 9}`, dash: DASHES[place % 4] });
      }
      if (runs.length === 1) one.marks = run.marks;
    }
  }
  return [...together.values()];
}

// One list of steps for all series: [steps, values of each].
function aligned(tables) {
  const steps = [...new Set(tables.flatMap((one) => one.steps))].sort((one, two) => one - two);
  const place = new Map(steps.map((step, index) => [step, index]));
  const columns = tables.map((one) => {
    const column = new Array(steps.length).fill(undefined);  // uPlot joins over undefined, and breaks at null
    one.steps.forEach((step, index) => { column[place.get(step)] = one.values[index]; });
    return column;
  });
  return [steps, columns];
}

// Places of values between gaps, which no line goes through.
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

function inWords(chart, columns, steps) {
  const told = chart.tables.map((one, place) => {
    const known = columns[place].map((value, index) => [value, steps[index]]).filter(([value]) => value !== null && value !== undefined);
    if (!known.length) return "";
    const [first, last] = [known[0], known[known.length - 1]];
    const least = known.reduce((one, two) => (two[0] < one[0] ? two : one));
    const most = known.reduce((one, two) => (two[0] > one[0] ? two : one));
    return `${one.name}: ${short(first[0])} at step ${first[1]}, ${short(last[0])} at step ${last[1]}, ` +
      `lowest ${short(least[0])} at ${least[1]}, highest ${short(most[0])} at ${most[1]}`;
  });
  return `${chart.title}${chart.unit ? ` in ${chart.unit}` : ""}. ${told.join("; ")}. Arrow keys read values, plus and minus zoom, 0 shows all.`;
}

function chartCard(chart) {
  const [steps, columns] = aligned(chart.tables);
  const stack = chart.style === "stack", off = hidden[chart.key] || (hidden[chart.key] = new Set());
  const plot = element("div", { class: "plot", tabindex: "0", role: "img", "aria-label": inWords(chart, columns, steps) });
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
    const told = chart.tables.map((one, place) => [one.name, columns[place][index], place])
      .filter(([, value, place]) => value !== null && value !== undefined && !off.has(chart.tables[place].name))
      .map(([name, value]) => `${name} ${short(value)}`);
    readout.textContent = `step ${steps[index]}: ${told.join(" · ")}`;
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
      series: [{}, ...chart.tables.map((one) => ({
        label: one.name, stroke: color(one.color), width: stack ? 1 : 1.6, dash: stack ? [] : one.dash,
        fill: stack ? color(one.color) : undefined, show: !off.has(one.name), spanGaps: false,
        points: { show: one.points || steps.length < 2, size: 7, fill: color(one.color),
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

  chart.tables.forEach((one) => {
    const line = drawing("svg", { width: 24, height: 10, "aria-hidden": "true" });
    line.append(stack || one.points
      ? drawing("rect", { x: 7, width: 10, height: 10, fill: color(one.color) })
      : drawing("line", { x1: 0, x2: 24, y1: 5, y2: 5, stroke: color(one.color), "stroke-width": 2.5,
        "stroke-dasharray": one.dash.join(" ") }));
    legend.append(element("button", { "aria-pressed": String(!off.has(one.name)), onclick: (event) => {
      if (off.has(one.name)) off.delete(one.name); else off.add(one.name);
      event.currentTarget.setAttribute("aria-pressed", String(!off.has(one.name)));
      draw();
    } }, line, one.name));
  });
  const kinds = [...new Set(chart.marks.map((mark) => mark.kind))].filter((kind) => MARKS[kind]);
  if (kinds.length) {
    legend.append(element("span", { class: "soft" }, kinds.map((kind) => `${MARKS[kind][0]} ${MARKS[kind][1]}`).join("  ")));
  }
  drawn.push({ draw, destroy: () => shown && shown.destroy(), resize: () => shown && shown.setSize({ width: Math.max(240, plot.clientWidth), height: 250 }) });
  return card;
}

// Some room above and below; a stack begins at 0, and ends at its ceiling.
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

// The whole.

function render(data) {
  newest = data;
  const held = document.activeElement && document.activeElement.closest("[data-chart]");
  for (const one of drawn) if (one.destroy) one.destroy();
  drawn = [];
  const runs = data.runs;
  const grid = element("div", { class: "charts" }, ...chartsOf(runs).map(chartCard));
  const links = [["charts", "Charts"], ["time", "Time and cost"], ["config", "Config"]];
  document.getElementById("report").replaceChildren(
    ...runs.map(heading), ...data.notes.map((note) => element("p", { class: "note" }, note)),
    element("nav", { "aria-label": "Parts of the report" }, ...links.map(([id, name]) => element("a", { href: `#${id}` }, name))),
    ...runs.flatMap((run) => [failuresOf(run), stragglersOf(run), adviceOf(run)].filter(Boolean).map((part) => titled(part, run, runs))),
    element("section", { id: "charts" }, element("h2", {}, "Charts"),
      element("p", { class: "soft" }, "Drag to zoom, double click to see all again; or use the keyboard: arrows, + − 0."), grid),
    element("div", { id: "time" }, ...runs.flatMap((run) =>
      [samplesOf(run), goodputOf(run), attemptsOf(run), processesOf(run), scalingOf(run)].filter(Boolean).map((part) => titled(part, run, runs)))),
    configOf(runs, data.config_differences),
    element("p", { class: "soft" }, `Made ${moment(data.made)} by jaxmnt ${data.jaxmnt} from the run's own lines. ` +
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
  for (const one of drawn) one.draw();
}

// Where a report is served live: asks for its data again and again, and shows what is new.
async function watch(seconds) {
  let version = null;
  for (;;) {
    await new Promise((done) => setTimeout(done, 1e3 * seconds));
    try {
      const answer = await fetch("data.json", { headers: version ? { "If-None-Match": version } : {} });
      if (answer.status === 200) {
        version = answer.headers.get("ETag");
        const [x, y] = [scrollX, scrollY], open = [...document.querySelectorAll("details")].map((one) => one.open);
        render(await answer.json());
        document.querySelectorAll("details").forEach((one, place) => { one.open = !!open[place]; });
        scrollTo(x, y);
      }
      document.title = document.title.replace(/ \(not reached\)$/, "");
    } catch (error) {
      if (!document.title.endsWith("(not reached)")) document.title += " (not reached)";
    }
  }
}

const given = JSON.parse(document.getElementById("data").textContent);
render(given);
let waiting = 0;
addEventListener("resize", () => {
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(() => drawn.forEach((one) => one.resize()));
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => render(newest));
if (given.watch_seconds) watch(given.watch_seconds);
