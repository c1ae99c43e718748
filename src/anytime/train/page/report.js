// Runs in the page's head, so that the theme stands before anything is painted; the rest waits for the document.
"use strict";
(() => {
  const COLOURS = 6;
  const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "x"];
  const DASHES = ["solid", "dash", "dot", "dashdot"];
  const NARROW = "(max-width: 720px)";
  // Where a chart's numbers are, and what it is called. The formats are d3's.
  const CHARTS = [
    { id: "beta", place: "average", title: "β", note: "the share of X in Y", from: "average", column: "beta", format: ".4~g" },
    { id: "c", place: "average", title: "c", note: "the weight of the newest Z in X", from: "average", column: "c", format: ".3~g", log: true },
    { id: "rho", place: "average", title: "ρ", note: "the RMS of Z, mean over the watched matrices", from: "average", column: "rho", format: ".4~g", zero: true },
    { id: "alpha", place: "average", title: "α", note: "the cosine between the update and Z", from: "average", column: "alpha", format: ".4~g" },
    { id: "distance", place: "average", title: "‖x − z‖", note: "between the average and the fast iterate", from: "average", column: "distance", format: ".4~g", zero: true },
    { id: "update_rms", place: "average", title: "Update RMS", note: "before the rate", from: "average", column: "update_rms", format: ".4~g", zero: true },
    { id: "tokens_per_second", place: "speed", title: "Tokens per second", from: "speed", column: "tokens_per_second", format: ".4~s", zero: true },
    { id: "mfu", place: "speed", title: "MFU", note: "the share of the device's peak arithmetic", from: "speed", column: "mfu", format: ".1%", zero: true, percent: true },
    { id: "lr", place: "speed", title: "Learning rate", from: "train", column: "lr", format: ".4~g", zero: true },
    { id: "grad_norm", place: "speed", title: "Gradient norm", note: "before clipping", from: "train", column: "grad_norm", format: ".4~g", log: true },
  ];

  // --- theme ---

  const dark = matchMedia("(prefers-color-scheme: dark)");
  const remembered = (() => {
    try { return localStorage.getItem("anytime-theme"); } catch { return null; }
  })();
  const state = { theme: ["light", "dark"].includes(remembered) ? remembered : "auto", axis: "tokens", hidden: new Set() };
  const applyTheme = () => {
    const chosen = state.theme === "auto" ? (dark.matches ? "dark" : "light") : state.theme;
    document.documentElement.dataset.theme = chosen;
  };
  applyTheme();

  // --- words and numbers ---

  const node = (tag, options = {}, ...children) => {
    const made = document.createElement(tag);
    for (const [key, value] of Object.entries(options)) {
      if (key === "run") made.style.setProperty("--run", `var(--run-${value % COLOURS})`);
      else if (key in made) made[key] = value;
      else made.setAttribute(key, value);
    }
    made.append(...children.filter((child) => child !== null && child !== undefined));
    return made;
  };
  const byId = (id) => document.getElementById(id);
  const whole = new Intl.NumberFormat("en");
  const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
  const show = (value, format) => (value === null || value === undefined ? "–" : format(value));
  const count = (value) => whole.format(Math.round(value));
  const short = (value) => compact.format(value);
  const fixed = (digits) => (value) => (Math.abs(value) < 1e6 ? value.toFixed(digits) : value.toExponential(2));
  const percent = (value) => `${(100 * value).toFixed(1)} %`;
  const duration = (seconds) => {
    if (seconds < 60) return `${seconds.toFixed(1)} s`;
    const minutes = Math.floor(seconds / 60);
    if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
    if (minutes < 2880) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
    return `${Math.floor(minutes / 1440)} d ${Math.floor((minutes % 1440) / 60)} h`;
  };
  const moment = (text) => new Date(text).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
  // Plotly reads a small part of HTML in labels.
  const label = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

  // --- cards and legend ---

  const card = (run, index) => {
    const h = run.headline;
    const facts = [
      ["Bits per byte", show(h.bits_per_byte, fixed(4))],
      ["Perplexity", show(h.perplexity, fixed(2))],
      ["Step", count(h.step)],
      ["Tokens", show(h.tokens, short)],
      ["Training time", show(h.seconds, duration)],
      ["Tokens per second", show(h.tokens_per_second, short)],
      ["Parameters", show(h.parameters, short)],
      h.mfu === null ? ["Training loss", show(h.train_loss, fixed(4))] : ["MFU", percent(h.mfu)],
    ];
    const where = h.evaluated ? `loss at ${h.sequence.toUpperCase()}, step ${count(h.at_step)}` : "not evaluated yet";
    const lines = node("div", { className: "lines" });
    const line = (text, className = "") => lines.append(node("p", { className }, text));
    if (h.stopped !== null) line(h.stopped ? `Stopped: ${h.stopped}` : "Stopped", "state");
    else line(`Running or killed; last row ${moment(h.written)}`, "state");
    if (h.branch) line(`Branched from ${h.branch.from} at step ${h.branch.step}`);
    if (h.resumes) line(`Resumed ${h.resumes === 1 ? "once" : `${h.resumes} times`}`);
    if (h.not_finite) line(`Training loss not finite in ${count(h.not_finite)} ${h.not_finite === 1 ? "step" : "steps"}`, "alert");
    if (h.unreadable) line(`${count(h.unreadable)} unreadable ${h.unreadable === 1 ? "line" : "lines"} in metrics.jsonl`, "alert");
    line([h.device, h.version && `anytime ${h.version}`, h.commit].filter(Boolean).join(" · "));
    return node("article", { className: "card", run: index },
      node("h3", { className: "name", title: run.folder }, node("span", { className: "swatch" }), run.name),
      node("p", { className: "big" }, node("strong", { className: h.evaluated && h.loss === null ? "alert" : "" }, h.evaluated ? show(h.loss ?? NaN, fixed(4)) : "–"), node("span", { className: "quiet" }, where)),
      node("dl", {}, ...facts.map(([name, value]) => node("div", {}, node("dt", {}, name), node("dd", {}, value)))),
      lines);
  };

  const MARKS = [  // the symbols above, as drawn in the legend
    "M0-4A4 4 0 1 0 .01-4Z", "M-3.5-3.5H3.5V3.5H-3.5Z", "M0-5L5 0L0 5L-5 0Z", "M0-5L4.6 3.5H-4.6Z",
    "M-5-1.6H-1.6V-5H1.6V-1.6H5V1.6H1.6V5H-1.6V1.6H-5Z", "M-4.6-2.3L-2.3-4.6L0-2.3L2.3-4.6L4.6-2.3L2.3 0L4.6 2.3L2.3 4.6L0 2.3L-2.3 4.6L-4.6 2.3L-2.3 0Z",
  ];
  const key = (index) => {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("viewBox", "-13 -6 26 12");
    svg.setAttribute("aria-hidden", "true");
    const dash = { solid: "", dash: "6 4", dot: "2 3", dashdot: "6 3 2 3" }[dashOf(index)];
    for (const [d, extra] of [["M-13 0H13", { stroke: true }], [MARKS[index % MARKS.length], { fill: true }]]) {
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      path.setAttribute("d", d);
      path.style.fill = extra.fill ? `var(--run-${index % COLOURS})` : "none";
      if (extra.stroke) Object.assign(path.style, { stroke: `var(--run-${index % COLOURS})`, strokeWidth: "2", strokeDasharray: dash });
      svg.append(path);
    }
    return svg;
  };
  const dashOf = (index) => DASHES[Math.floor(index / COLOURS) % DASHES.length];

  // --- plots ---

  const UNITS = [[1, "seconds"], [60, "minutes"], [3600, "hours"], [86400, "days"]];
  const AXES = { tokens: ["tokens", "tokens"], time: ["seconds", "training time"], step: ["step", "step"] };
  let runs = [];
  let unit = UNITS[0];

  // What a log axis has no place for is left out: Plotly would draw a line to it from the edge.
  const onAxis = (values, log, scale = 1) => values.map((v) => (v === null || (log && v <= 0) ? null : v / scale));
  const horizontal = (table) => onAxis(table[AXES[state.axis][0]] ?? [], byId("log-x").checked, state.axis === "time" ? unit[0] : 1);
  const isLogY = (chart) => (chart.id === "loss" ? byId("log-y").checked : Boolean(chart.log));

  const tracesOf = (chart, colour) => {
    const traces = [];
    const add = (run, index, from, column, options) => {
      const table = run[from];
      if (state.hidden.has(index) || !table[column]?.length) return;
      const { line, name, ...rest } = options;
      traces.push({
        type: "scatter", x: horizontal(table), y: onAxis(table[column], isLogY(chart)), name: label(name ?? run.name), connectgaps: false,
        hovertemplate: `%{fullData.name}  <b>%{y:${chart.format}}</b><extra></extra>`,
        line: { color: colour(`--run-${index % COLOURS}`), dash: dashOf(index), ...line }, ...rest,
      });
    };
    if (chart.id === "loss") {
      if (byId("training").checked) {
        runs.forEach((run, i) => add(run, i, "train", "loss", { mode: "lines", line: { width: 1 }, opacity: 0.45, name: `${run.name}, training` }));
      }
      runs.forEach((run, i) => {
        const room = byId("plot-loss").clientWidth / (3 * run.eval.step.length);
        add(run, i, "eval", "loss", { mode: "lines+markers", legendrank: 1, line: { width: 2 }, marker: { size: Math.min(Math.max(room, 4), 7), symbol: SYMBOLS[i % SYMBOLS.length], color: colour(`--run-${i % COLOURS}`) } });
      });
    } else {
      runs.forEach((run, i) => {
        const few = (run[chart.from][chart.column]?.length ?? 0) <= 2;  // a line needs more
        add(run, i, chart.from, chart.column, { mode: few ? "lines+markers" : "lines", line: { width: 1.75 } });
      });
    }
    return traces;
  };

  // The same for all plots, so that they can be read together: from the first to the last number of any run shown.
  const horizontalRange = (log) => {
    let [low, high] = [Infinity, -Infinity];
    runs.forEach((run, index) => {
      if (state.hidden.has(index)) return;
      for (const table of [run.train, run.eval, run.average, run.speed]) {
        for (const v of horizontal(table)) {
          if (v === null) continue;
          low = Math.min(low, v);
          high = Math.max(high, v);
        }
      }
    });
    return padded(low, high, log, 0.015);
  };

  // The first losses would flatten all that follows: on a linear axis the range is that of what comes after a fiftieth,
  // and of the last point of every run, however short or bad.
  const lossRange = (traces, end, logX, logY) => {
    let [low, high] = [Infinity, -Infinity];
    for (const { x, y } of traces) {
      y.forEach((v, i) => {
        if (v === null || x[i] === null) return;
        low = Math.min(low, v);
        if (logX || x[i] >= end / 50) high = Math.max(high, v);
      });
      const last = y.filter((v, i) => v !== null && x[i] !== null).at(-1);
      if (last !== undefined) high = Math.max(high, last);
    }
    return padded(low, high, logY, 0.05);
  };

  const padded = (low, high, log, share) => {
    if (!(low < high)) return null;
    const [a, b] = log ? [Math.log10(low), Math.log10(high)] : [low, high];
    return [a - share * (b - a), b + share * (b - a)];
  };

  // Every label in full; 1, 2, 5 where all nine of a decade would crowd and powers of ten would be too few.
  const logTicks = (traces) => {
    const values = traces.flatMap((trace) => trace.y).filter((v) => v !== null);
    const decades = Math.log10(values.reduce((a, b) => Math.max(a, b), 0) / values.reduce((a, b) => Math.min(a, b), Infinity));
    return { tickformat: ".3~g", ...(decades > 0.8 && decades < 3.5 ? { dtick: "D2" } : {}) };
  };

  const draw = (chart) => {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const narrow = matchMedia(NARROW).matches;
    const font = { family: style.getPropertyValue("--sans").trim(), size: 12, color: colour("--quiet") };
    const traces = tracesOf(chart, colour);
    const logX = byId("log-x").checked;
    const logY = isLogY(chart);
    const axis = { gridcolor: colour("--grid"), linecolor: colour("--line"), zeroline: false, automargin: true, exponentformat: "B", minexponent: 3 };
    const title = state.axis === "time" ? `${AXES.time[1]}, ${unit[1]}` : AXES[state.axis][1];
    const titled = { tokens: "%{x:,.0f} tokens", time: `%{x:.4~g} ${unit[1]}`, step: "step %{x:,.0f}" }[state.axis];
    const rangeX = horizontalRange(logX);
    const rangeY = chart.id === "loss" && rangeX ? lossRange(traces, logX ? 0 : rangeX[1], logX, logY) : null;
    const fixedRange = (range) => (range ? { range, autorange: false } : {});
    const layout = {
      showlegend: false, autosize: true, height: byId(`plot-${chart.id}`).clientHeight, margin: { l: narrow ? 44 : 58, r: 14, t: 10, b: 40 }, font,
      paper_bgcolor: colour("--surface"), plot_bgcolor: colour("--surface"),
      hovermode: "x unified", dragmode: narrow ? false : "zoom",
      hoverlabel: { bgcolor: colour("--surface"), bordercolor: colour("--line"), font: { ...font, color: colour("--text") }, namelength: -1 },
      xaxis: { ...axis, type: logX ? "log" : "linear", title: { text: title, standoff: 8, font }, showline: true, spikecolor: colour("--quiet"), spikethickness: 1, spikedash: "dot", nticks: narrow ? 6 : 0, unifiedhovertitle: { text: titled }, ...(logX && rangeX && rangeX[1] - rangeX[0] > 1.5 ? { dtick: 1, minor: { dtick: "D1", ticks: "outside", ticklen: 3, tickcolor: colour("--line") } } : {}), ...fixedRange(rangeX) },
      yaxis: { ...axis, type: logY ? "log" : "linear", rangemode: chart.zero ? "tozero" : "normal", ...(chart.percent ? { tickformat: ".0%" } : {}), ...(logY ? logTicks(traces) : {}), ...fixedRange(rangeY) },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--quiet"), activecolor: colour("--text") },
      uirevision: [state.axis, logX, logY].join(),  // a zoom outlives a change of theme, not one of axis
    };
    const options = { responsive: true, displaylogo: false, modeBarButtons: [["toImage", "resetScale2d"]], toImageButtonOptions: { filename: chart.id, scale: 2 } };
    return Plotly.react(byId(`plot-${chart.id}`), traces, layout, options);
  };

  let drawn = [];
  const drawAll = () => window.Plotly && drawn.forEach(draw);
  const pause = () => new Promise((done) => { setTimeout(done, 0); });

  // Plotly is large: it is let in once the rest of the page stands, and the plots come one by one from the top.
  const drawFirst = async () => {
    await pause();
    document.head.append(node("script", { textContent: byId("plotly").textContent }));
    for (const chart of drawn) {
      draw(chart);
      await pause();
    }
    document.documentElement.dataset.ready = "true";
  };

  const placeCharts = () => {
    const has = (chart) => runs.some((run) => run[chart.from][chart.column]?.some((v) => v !== null));
    const charts = CHARTS.filter(has);
    for (const chart of charts) {
      const caption = node("figcaption", {}, node("h3", {}, chart.title), node("span", { className: "quiet" }, [chart.note, chart.log && "log scale"].filter(Boolean).join("; ")));
      byId(chart.place).append(node("figure", { className: "chart" }, caption, node("div", { className: "plot", id: `plot-${chart.id}`, role: "img", ariaLabel: `${chart.title} of each run` })));
    }
    for (const place of ["average", "speed"]) byId(`${place}-section`).hidden = !charts.some((chart) => chart.place === place);
    const losses = runs.some((run) => run.eval.step.length || run.train.loss);
    byId("loss-section").hidden = !losses;
    byId("bar").hidden = !losses && !charts.length;
    drawn = [...(losses ? [{ id: "loss", format: ".4f" }] : []), ...charts];
    const longest = Math.max(0, ...runs.map((run) => run.headline.seconds ?? 0));
    unit = UNITS.findLast(([size]) => longest >= 2 * size) ?? UNITS[0];
  };

  // --- tables and samples ---

  const box = (name, ...children) => node("div", { className: "box", tabIndex: 0, role: "region", ariaLabel: name }, ...children);

  const settings = () => {
    const names = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))];
    byId("settings-section").hidden = !names.length;
    const known = runs.filter((run) => Object.keys(run.settings).length);
    const differs = (name) => known.some((run) => run.settings[name] !== known[0].settings[name]);
    const row = (name) => node("tr", { className: differs(name) ? "differs" : "" }, node("th", { scope: "row" }, name), ...runs.map((run) => node("td", {}, run.settings[name] ?? "–")));
    const different = names.filter(differs);
    const same = names.filter((name) => !differs(name));
    const rest = node("tbody", { id: "same-settings", hidden: runs.length > 1 && different.length > 0 }, ...same.map(row));
    const table = node("table", {},
      node("thead", {}, node("tr", {}, node("th", { scope: "col" }, "Setting"), ...runs.map((run, i) => node("th", { scope: "col" }, node("span", { className: "name", run: i }, node("span", { className: "swatch" }), run.name))))),
      node("tbody", {}, ...different.map(row)), rest);
    const above = node("div", { className: "above" });
    if (runs.length > 1) above.append(node("span", { className: "quiet" }, different.length ? `${different.length} of ${names.length} settings differ` : "All settings are the same"));
    if (runs.length > 1 && same.length) {
      const button = node("button", { type: "button" });
      button.setAttribute("aria-controls", rest.id);
      const tell = () => {
        button.textContent = `${rest.hidden ? "Show" : "Hide"} ${same.length} identical`;
        button.setAttribute("aria-expanded", String(!rest.hidden));
      };
      button.addEventListener("click", () => { rest.hidden = !rest.hidden; tell(); });
      tell();
      above.append(button);
    }
    byId("settings").append(above, box("Settings", table));
  };

  const samples = () => {
    const steps = [...new Set(runs.flatMap((run) => run.samples.map((s) => s.step)))].sort((a, b) => b - a);
    byId("samples-section").hidden = !steps.length;
    if (!steps.length) return;
    const place = node("div", { className: "samples" });
    const fill = (chosen) => place.replaceChildren(...runs.flatMap((run, i) => {
      const step = Math.max(...run.samples.map((s) => s.step).filter((s) => s <= chosen));
      if (!Number.isFinite(step)) return [];
      return [node("article", { className: "sample", run: i },
        node("h3", { className: "name" }, node("span", { className: "swatch" }), `${run.name}, step ${count(step)}`),
        ...run.samples.filter((s) => s.step === step).map((s) => {
          const rest = s.text.startsWith(s.prompt) ? s.text.slice(s.prompt.length) : s.text;
          return node("pre", { tabIndex: 0 }, node("b", {}, s.prompt), rest);
        }))];
    }));
    if (steps.length > 1) {
      const select = node("select", { id: "sample-step" }, ...steps.map((step) => node("option", { value: String(step) }, count(step))));
      select.addEventListener("change", () => fill(Number(select.value)));
      byId("samples").append(node("div", { className: "above" }, node("label", { htmlFor: select.id, className: "quiet" }, "Up to step"), select, node("span", { className: "quiet" }, "Prompts are dim.")));
    }
    byId("samples").append(place);
    fill(steps[0]);
  };

  const evaluations = () => {
    byId("evaluations-section").hidden = !runs.some((run) => run.eval.step.length);
    const several = runs.length > 1;
    const columns = [["step", "Step", count], ["tokens", "Tokens", count], ["seconds", "Time", duration], ["loss", "Loss at X", fixed(4)], ["perplexity", "Perplexity", fixed(2)], ["bits_per_byte", "Bits per byte", fixed(4)]]
      .filter(([name]) => runs.some((run) => run.eval[name].some((v) => v !== null)));
    const body = runs.map((run, r) => node("tbody", {}, ...run.eval.step.map((_, i) => node("tr", {},
      several ? node("td", { run: r }, node("span", { className: "swatch" }), run.name) : null,
      ...columns.map(([name, , format]) => node("td", { className: "right" }, name === "loss" ? show(run.eval.loss[i] ?? NaN, format) : show(run.eval[name][i], format)))))));
    const head = node("tr", {}, several ? node("th", { scope: "col" }, "Run") : null, ...columns.map(([, title]) => node("th", { scope: "col", className: "right" }, title)));
    const cut = runs.filter((run) => run.evaluations > run.eval.step.length);
    if (cut.length) byId("evaluations").append(node("p", { className: "quiet above" }, cut.map((run) => `${run.name}: ${run.eval.step.length} of ${run.evaluations} evaluations, evenly picked`).join("; ")));
    byId("evaluations").append(box("Evaluations", node("table", {}, node("thead", {}, head), ...body)));
  };

  // --- all of it ---

  const legend = () => {
    if (runs.length < 2) return;
    runs.forEach((run, index) => {
      const button = node("button", { type: "button", title: `Show or hide ${run.name}` }, key(index), run.name);
      button.setAttribute("aria-pressed", "true");
      button.addEventListener("click", () => {
        const hide = !state.hidden.delete(index);
        if (hide) state.hidden.add(index);
        button.setAttribute("aria-pressed", String(!hide));
        drawAll();
      });
      byId("legend").append(button);
    });
  };

  document.addEventListener("DOMContentLoaded", () => {
    const data = JSON.parse(byId("data").textContent);
    runs = data.runs;
    byId("about").textContent = runs.length === 1 ? runs[0].name : `${runs.length} runs`;
    byId("made").textContent = `Made ${moment(data.made)}`;
    byId("cards").append(...runs.map(card));
    legend();
    placeCharts();
    settings();
    samples();
    evaluations();

    for (const input of document.querySelectorAll("#theme input")) {
      input.checked = input.value === state.theme;
      input.addEventListener("change", () => {
        state.theme = input.value;
        try { localStorage.setItem("anytime-theme", state.theme); } catch { /* then it is forgotten */ }
        applyTheme();
        drawAll();
      });
    }
    dark.addEventListener("change", () => { applyTheme(); drawAll(); });
    matchMedia(NARROW).addEventListener("change", drawAll);
    for (const input of document.querySelectorAll("#axis input")) {
      input.checked = input.value === state.axis;  // browsers keep a form's state over a reload
      input.addEventListener("change", () => { state.axis = input.value; drawAll(); });
    }
    for (const id of ["log-x", "log-y", "training"]) byId(id).addEventListener("change", drawAll);
    drawFirst();
  });
})();
