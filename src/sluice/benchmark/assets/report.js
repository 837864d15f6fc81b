"use strict";
// Draws the chart of report.html with uPlot. All that is shown comes from the JSON in the page.
(() => {
  const { scenarios } = JSON.parse(document.getElementById("data").textContent);
  const SHORT = { float32: "fp32", bfloat16: "bf16", float16: "fp16" };
  const charts = scenarios.flatMap((scenario) => scenario.states.map((state) => {
    const limit = scenario.host_limit_bytes === null ? "" : `, ${(scenario.host_limit_bytes / 1048576).toFixed(0)} MiB`;
    const series = scenario.timelines.filter((line) => line.state === state).map((line) => {
      const run = scenario.runs.find((each) => each.method === line.method && each.state === state && each.repetition === line.repetition);
      const { anon_bytes: anon, file_bytes: file, device_bytes: device, shmem_bytes: shmem } = line;
      const total = anon.map((bytes, position) => bytes + file[position] + shmem[position]);
      return { method: line.method, status: run.status, reason: run.reason, seconds: run.seconds, seconds_at: line.seconds, total, anon, file, device };
    });
    return { label: `${SHORT[scenario.dtype]}, ${state}${limit}`, title: `${scenario.title}, ${state}`,
      finding: scenario.findings[state], final_bytes: scenario.final_bytes, series };
  })).filter((chart) => chart.series.length);
  const end = Math.max(0, ...charts.flatMap((chart) => chart.series.map((series) => series.seconds_at[series.seconds_at.length - 1])));
  const ours = (method) => method.startsWith("sluice");
  for (const chart of charts) chart.series.sort((a, b) => ours(a.method) - ours(b.method));  // ours is drawn on top
  const holder = document.getElementById("chart");
  const tip = document.getElementById("tip");
  const buttons = document.getElementById("methods");
  const KIND_LABELS = { total: "total", anon: "anonymous", file: "mapped file", device: "accelerator" };
  const MIB = 1048576, GIB = 1073741824;
  const hidden = new Set();
  const chosen = { chart: 0, kind: "total", scale: "linear" };
  let plot = null;

  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const bytes = (n) => (Math.abs(n) >= GIB ? `${(n / GIB).toFixed(2)} GiB` : `${(n / MIB).toFixed(0)} MiB`);
  const peak = (series) => Math.max(0, ...series[chosen.kind]);
  const methods = [...new Set(charts.flatMap((chart) => chart.series.map((series) => series.method)))];
  // Ours has the first colour in every chart, wherever it stands in the table.
  const ranked = [...methods].sort((a, b) => ours(b) - ours(a));
  const colour = (method) => style(`--c${ranked.indexOf(method) % 12}`);

  function element(tag, properties, ...children) {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  }

  function choices(title, name, options) {
    const row = element("div", { className: "choices" });
    for (const [value, label] of options) {
      const id = `${name}-${value}`;
      const input = element("input", { type: "radio", name, id, checked: String(chosen[name]) === String(value) });
      input.addEventListener("change", () => { chosen[name] = value; show(); });
      const box = element("span", {}, input, element("label", { htmlFor: id, textContent: label }));
      row.append(box);
    }
    return element("fieldset", {}, element("legend", { textContent: title }), row);
  }

  function drawMethods(chart) {
    buttons.replaceChildren();
    chart.series.forEach((series, position) => {
      const swatch = element("span", { className: "swatch" });
      swatch.style.background = colour(series.method);
      const dead = series.status !== "ok";
      const figure = dead ? `${series.status} at ${bytes(peak(series))}` : `${bytes(peak(series))}, ${series.seconds.toFixed(2)} s`;
      const button = element("button", { type: "button", title: series.reason },
        swatch, series.method, element("span", { className: dead ? "figure dead" : "figure", textContent: figure }));
      button.dataset.method = series.method;
      button.setAttribute("aria-pressed", String(!hidden.has(series.method)));
      button.addEventListener("click", () => {
        hidden.has(series.method) ? hidden.delete(series.method) : hidden.add(series.method);
        button.setAttribute("aria-pressed", String(!hidden.has(series.method)));
        plot.setSeries(position + 1, { show: !hidden.has(series.method) });
      });
      for (const [event, focus] of [["mouseenter", true], ["focus", true], ["mouseleave", false], ["blur", false]])
        button.addEventListener(event, () => plot.setSeries(focus && !hidden.has(series.method) ? position + 1 : null, { focus }));
      buttons.append(button);
    });
  }

  // The last reading at or before a moment; null after the load has ended.
  function reading(series, seconds) {
    const times = series.seconds_at;
    if (seconds > times[times.length - 1]) return null;
    let low = 0, high = times.length - 1;
    while (low < high) {
      const middle = Math.ceil((low + high) / 2);
      if (times[middle] <= seconds) low = middle; else high = middle - 1;
    }
    return series[chosen.kind][low];
  }

  function showTip(chart, u) {
    const { left, top } = u.cursor;
    if (left == null || left < 0) { tip.hidden = true; return; }
    const seconds = u.posToVal(left, "x");
    const drawn = chart.series.filter((series) => !hidden.has(series.method));
    const lines = drawn.map((series) => ({ series, value: reading(series, seconds) }))
      .sort((a, b) => (b.value ?? -1) - (a.value ?? -1));
    tip.replaceChildren(element("b", { textContent: `${seconds.toFixed(3)} s` }));
    for (const { series, value } of lines) {
      const swatch = element("i", {});
      swatch.style.background = colour(series.method);
      const ended = series.status === "ok" ? "done" : series.status;
      tip.append(element("div", {}, swatch, `${series.method}: ${value === null ? ended : bytes(value)}`));
    }
    tip.hidden = false;
    const x = u.bbox.left / devicePixelRatio + left;
    const right = x + tip.offsetWidth + 24 < holder.clientWidth;
    tip.style.left = `${Math.max(0, right ? x + 12 : x - tip.offsetWidth - 12)}px`;
    tip.style.top = `${Math.max(0, Math.min(top, holder.clientHeight - tip.offsetHeight - 40))}px`;
  }

  const visible = (u, seconds) => seconds >= u.scales.x.min && seconds <= u.scales.x.max;

  function marks(chart, unit) {
    return (u) => {
      const { ctx } = u, ratio = devicePixelRatio;
      ctx.save();
      const y = u.valToPos(chart.final_bytes / unit, "y", true);
      ctx.strokeStyle = ctx.fillStyle = style("--ink");
      ctx.lineWidth = ratio;
      ctx.setLineDash([6 * ratio, 4 * ratio]);
      ctx.beginPath();
      ctx.moveTo(u.bbox.left, y);
      ctx.lineTo(u.bbox.left + u.bbox.width, y);
      ctx.stroke();
      ctx.setLineDash([]);
      ctx.font = `${12 * ratio}px system-ui, sans-serif`;
      ctx.textAlign = "right";
      const label = [`F = ${bytes(chart.final_bytes)}`, u.bbox.left + u.bbox.width - 4 * ratio, y - 6 * ratio];
      ctx.strokeStyle = style("--card");  // lines may pass below the text
      ctx.lineWidth = 4 * ratio;
      ctx.strokeText(...label);
      ctx.fillText(...label);
      ctx.beginPath();  // marks outside of the zoomed range belong to lines that are not drawn there
      ctx.rect(u.bbox.left, u.bbox.top - 8 * ratio, u.bbox.width, u.bbox.height + 16 * ratio);
      ctx.clip();
      chart.series.forEach((series, position) => {
        const values = series[chosen.kind];
        if (hidden.has(series.method) || !values.length || peak(series) <= floor) return;
        const at = (index) => [u.valToPos(series.seconds_at[index], "x", true), u.valToPos(Math.max(values[index], floor) / unit, "y", true)];
        const top = values.indexOf(peak(series));
        const [px, py] = at(top);
        ctx.globalAlpha = u.series[position + 1].alpha ?? 1;
        ctx.fillStyle = ctx.strokeStyle = colour(series.method);
        if (visible(u, series.seconds_at[top])) {
          ctx.beginPath();
          ctx.arc(px, py, 4 * ratio, 0, 2 * Math.PI);
          ctx.fill();
        }
        if (series.status !== "ok" && visible(u, series.seconds_at[values.length - 1])) {
          const [ex, ey] = at(values.length - 1), d = 6 * ratio;
          ctx.lineWidth = 3 * ratio;
          ctx.beginPath();
          ctx.moveTo(ex - d, ey - d); ctx.lineTo(ex + d, ey + d);
          ctx.moveTo(ex - d, ey + d); ctx.lineTo(ex + d, ey - d);
          ctx.stroke();
        }
      });
      ctx.restore();
    };
  }

  // A logarithm has no place for nothing: less than a MiB is drawn as one.
  let floor = 0;

  function draw() {
    const chart = charts[chosen.chart];
    plot?.destroy();
    tip.hidden = true;
    const log = chosen.scale === "log";
    floor = log ? MIB : 0;
    const highest = Math.max(chart.final_bytes, ...chart.series.map(peak));
    const unit = highest >= GIB ? GIB : MIB;
    const data = uPlot.join(chart.series.map((series) =>
      [series.seconds_at, series[chosen.kind].map((value) => Math.max(value, floor) / unit)]));
    if (data[0][data[0].length - 1] < end) {  // one time axis for all charts
      data[0] = [...data[0], end];
      for (let position = 1; position < data.length; position++) data[position] = [...data[position], null];
    }
    const axis = { stroke: style("--soft"), grid: { stroke: style("--grid"), width: 1 }, ticks: { stroke: style("--line"), width: 1 } };
    const range = log ? [floor / unit, (highest / unit) * 1.5] : [0, (highest / unit) * 1.08];
    plot = new uPlot({
      width: holder.clientWidth,
      height: holder.clientHeight,
      legend: { show: false },
      focus: { alpha: 0.2 },
      cursor: { points: { show: false }, y: false },
      scales: { x: { time: false }, y: { distr: log ? 3 : 1, range: () => range } },
      axes: [
        { ...axis, label: "seconds", labelSize: 20, size: 36 },
        { ...axis, label: unit === GIB ? "GiB" : "MiB", labelSize: 20, size: 52,
          values: (u, splits) => splits.map((value) => (value === null ? "" : Number(value.toPrecision(3)).toString())) },
      ],
      series: [{}, ...chart.series.map((series) => ({
        label: series.method,
        stroke: colour(series.method),
        width: ours(series.method) ? 3.5 : 2,
        show: !hidden.has(series.method),
        spanGaps: true,
        points: { show: false },
      }))],
      hooks: { draw: [marks(chart, unit)], setCursor: [(u) => showTip(chart, u)] },
    }, data, holder);
  }

  function show() {
    const chart = charts[chosen.chart];
    drawMethods(chart);
    draw();
    const died = chart.series.some((series) => series.status !== "ok");
    document.getElementById("caption").textContent =
      `${chart.title}. ${chart.finding}. A dot is the peak of a line${died ? ", a cross the moment at which a process died" : ""}; ` +
      "the dashed line is F, the finished model. All charts of this page have the same time axis.";
  }

  const kinds = Object.keys(KIND_LABELS).filter((kind) => charts.some((chart) => chart.series.some((series) => series[kind].length)));
  document.getElementById("controls").append(
    choices("load", "chart", charts.map((chart, position) => [position, chart.label])),
    choices("memory", "kind", kinds.map((kind) => [kind, KIND_LABELS[kind]])),
    choices("scale", "scale", [["linear", "linear"], ["log", "log"]]),
  );
  holder.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !plot) return;
    event.preventDefault();
    const width = plot.bbox.width / devicePixelRatio;
    const from = plot.cursor.left == null || plot.cursor.left < 0 ? 0 : plot.cursor.left;
    plot.setCursor({ left: Math.min(width - 1, Math.max(0, from + step * (width / 60))), top: plot.bbox.height / devicePixelRatio });
  });
  holder.addEventListener("blur", () => { tip.hidden = true; });
  new ResizeObserver(() => plot?.setSize({ width: holder.clientWidth, height: holder.clientHeight })).observe(holder);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  show();
})();
