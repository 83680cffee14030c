"use strict";
// Draws what the server's frames say, one per second. No text of a frame becomes markup: everything is set as text.
(() => {
  const MOST = 600;
  const $ = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";
  const columns = Array.from({ length: 13 }, () => []);
  const T = 0, IN = 1, OUT = 2, BYTES = 4, LIMIT = 5, WAIT = 6, SEND = 9, BAND = 12;
  let last = null, paused = false, heard = 0, announced = "", commands = "";

  // -- words ---------------------------------------------------------------------------------------------------
  const known = (value) => value !== null && value !== undefined;
  const number = (value) => {
    if (!known(value)) return "–";
    if (value >= 1e6) return (value / 1e6).toFixed(1) + " M";
    if (value > 0 && value < 10 && value % 1) return value.toFixed(1);
    return Math.round(value).toLocaleString("en");
  };
  const rate = (value) => (known(value) ? number(value) + "/s" : "–");
  const duration = (value) => {
    if (!known(value)) return "–";
    if (value === 0) return "0 s";
    if (value < 0.001) return Math.max(1, Math.round(value * 1e6)) + " µs";
    if (value < 1) return Math.round(value * 1000) + " ms";
    if (value < 60) return value.toFixed(value < 10 && value % 1 ? 1 : 0) + " s";
    const units = [[86400, "d"], [3600, "h"], [60, "min"]];
    for (let place = 0; place < 3; place++) {
      const [length, unit] = units[place];
      if (value >= length) {
        const next = units[place + 1];
        const more = next ? Math.floor((value % length) / next[0]) : 0;
        return Math.floor(value / length) + " " + unit + (more ? " " + more + " " + next[1] : "");
      }
    }
    return "–";
  };
  const size = (value) => {
    if (!known(value)) return "–";
    for (const unit of ["B", "KiB", "MiB", "GiB"]) {
      if (value < 1024) return (unit === "B" ? Math.round(value) : value.toFixed(1)) + " " + unit;
      value /= 1024;
    }
    return value.toFixed(1) + " TiB";
  };
  const clock = (at) => new Date(at * 1000).toLocaleTimeString([], { hour12: false });

  // -- elements ------------------------------------------------------------------------------------------------
  const put = (element, text) => { if (element.textContent !== text) element.textContent = text; };
  const make = (name, className, text) => {
    const element = document.createElement(name);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const draw = (name, attributes, text) => {
    const element = document.createElementNS(SVG, name);
    for (const key in attributes) element.setAttribute(key, attributes[key]);
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const table = (element, heads, rows) => {
    // Cells are reused: a table that is built anew each second would lose a selection and cost more.
    if (!element.tHead) {
      const row = element.createTHead().insertRow();
      for (const [text, className] of heads) { const head = make("th", className || "", text); head.scope = "col"; row.append(head); }
      element.createTBody();
    }
    const body = element.tBodies[0];
    while (body.rows.length > rows.length) body.deleteRow(-1);
    rows.forEach((cells, index) => {
      const row = body.rows[index] || body.insertRow();
      while (row.cells.length < cells.length) row.insertCell();
      cells.forEach((cell, place) => {
        const target = row.cells[place];
        const [text, className, state] = Array.isArray(cell) ? cell : [cell, "", null];
        if (target.className !== (className || "")) target.className = className || "";
        if (state) {
          let span = target.firstElementChild;
          if (!span) { target.textContent = ""; span = target.appendChild(make("span")); }
          span.className = "state " + state;
          put(span, text);
          span.title = state;
        } else put(target, text);
      });
    });
  };

  // -- charts --------------------------------------------------------------------------------------------------
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const charts = [];
  const decades = (_, at) => at.map((value) => (known(value) && Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-6 ? value : null));
  // uPlot counts the lines of a logarithmic axis up from its lowest value, and from 0.00096, say, never gets to the end.
  const decade = (value) => 10 ** Math.floor(Math.log10(value));
  const binary = Array.from({ length: 44 }, (_, power) => 2 ** power);
  class Chart {
    constructor(id, series, format, options) {
      Object.assign(this, { host: $("c-" + id), legend: $("l-" + id), series, format, options: options || {} });
      this.values = series.map((each) => {
        const entry = make("span", "c-" + each.colour);
        entry.append(make("i"), make("span", "", each.label), make("b", "", "–"));
        this.legend.append(entry);
        return entry.lastChild;
      });
      charts.push(this);
      this.build();
    }
    build() {
      if (this.plot) this.plot.destroy();
      const soft = colour("soft"), line = colour("line");
      const axis = { stroke: soft, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "11px system-ui, sans-serif" };
      const log = this.options.log;
      this.plot = new uPlot({
        width: Math.max(200, this.host.clientWidth), height: 170, legend: { show: false }, cursor: { y: false, points: { size: 6 } },
        scales: { x: { time: true }, y: log ? { distr: 3, range: (_, low, high) => [decade(Math.min(low || 0.001, 0.001)), Math.max(high || 1, 0.1)] } : { range: (_, low, high) => [0, Math.max(1, (high || 0) * 1.08)] } },
        series: [{}, ...this.series.map((each) => ({
          stroke: colour(each.colour), width: each.width || 2, dash: each.dash, spanGaps: true, points: { show: false },
          fill: each.fill ? colour(each.colour) + "1f" : undefined,
        }))],
        axes: [
          { ...axis, space: 80, size: 30, values: (_, at) => at.map((value) => clock(value).slice(0, value % 60 ? 8 : 5)) },
          log ? { ...axis, size: 62, filter: decades, grid: { ...axis.grid, filter: decades }, ticks: { ...axis.ticks, filter: decades }, values: (_, at) => at.map((value) => (known(value) ? this.format(value) : "")) }
            : { ...axis, size: 62, space: 36, ...(this.format === size ? { incrs: binary } : {}), values: (_, at) => at.map((value) => this.format(value)) },
        ],
        hooks: { setCursor: [(plot) => this.read(plot.cursor.idx)] },
      }, this.data(), this.host);
    }
    data() {
      const soon = columns[T];
      return [soon, ...this.series.map((each) => (this.options.log ? columns[each.column].map((value) => value || null) : columns[each.column]))];
    }
    read(index) {
      const place = known(index) ? index : columns[T].length - 1;
      this.series.forEach((each, at) => put(this.values[at], known(columns[each.column][place]) ? this.format(columns[each.column][place]) : "–"));
    }
    update() {
      this.plot.setData(this.data());
      this.read(this.plot.cursor.idx);
      this.host.setAttribute("aria-label", this.series.map((each, at) => each.label + " " + this.values[at].textContent).join(", "));
    }
    resize() { this.plot.setSize({ width: Math.max(200, this.host.clientWidth), height: 170 }); }
  }
  new Chart("flow", [{ label: "in", colour: "in", column: IN, fill: true }, { label: "delivered", colour: "out", column: OUT, fill: true }], number);
  new Chart("queue", [{ label: "bytes", colour: "queue", column: BYTES, fill: true }, { label: "limit", colour: "limit", column: LIMIT, dash: [6, 4], width: 1.5 }], size);
  new Chart("latency", [
    { label: "wait p50", colour: "in", column: WAIT }, { label: "p95", colour: "in", column: WAIT + 1, dash: [6, 3], width: 1.4 }, { label: "p99", colour: "in", column: WAIT + 2, dash: [2, 3], width: 1.4 },
    { label: "send p50", colour: "send", column: SEND }, { label: "p95", colour: "send", column: SEND + 1, dash: [6, 3], width: 1.4 }, { label: "p99", colour: "send", column: SEND + 2, dash: [2, 3], width: 1.4 },
  ], duration, { log: true });

  // -- panels --------------------------------------------------------------------------------------------------
  const CARDS = [
    ["In", (f) => rate(f.cards.in)], ["Delivered", (f) => rate(f.cards.out)], ["Waiting", (f) => number(f.cards.waiting)],
    ["Oldest", (f) => duration(f.cards.oldest), (f) => (f.cards.oldest > 60 ? "warn" : "")],
    ["Dead letters", (f) => number(f.cards.dead), (f) => (f.cards.dead ? "bad" : "")],
    ["Lost", (f) => number(f.cards.lost), (f) => (f.cards.lost ? "bad" : "")],
  ];
  const cards = CARDS.map(([name]) => {
    const card = make("dl", "card");
    card.append(make("dt", "", name), make("dd", "", "–"));
    $("cards").append(card);
    return card;
  });

  const WIDTH = 178, HEIGHT = 50, STEP = 66;
  const drawGraph = (frame) => {
    const host = $("graph"), room = Math.max(host.clientWidth - 2, 4 * WIDTH + 150);
    const places = new Map(), heights = [0, 0, 0, 0];
    for (const node of frame.nodes) heights[node.column]++;
    const used = [0, 1, 2, 3].filter((column) => heights[column]);
    const total = Math.max(1, ...heights) * STEP, width = Math.min(room, 1180), gap = used.length > 1 ? (width - WIDTH - 4) / (used.length - 1) : 0;
    const seen = [0, 0, 0, 0];
    for (const node of frame.nodes) {
      const space = total / heights[node.column];
      places.set(node.id, { x: 2 + used.indexOf(node.column) * gap, y: (seen[node.column]++ + 0.5) * space - HEIGHT / 2, node });
    }
    // A destination stands next to its exporter.
    for (const [id, place] of places) if (id.startsWith("sink/")) place.y = (places.get("exporter/" + label(id)) || place).y;
    const svg = draw("svg", { width, height: total, viewBox: `0 0 ${width} ${total}`, role: "img" });
    svg.append(draw("title", {}, "The pipeline: " + frame.edges.map((edge) => `${label(edge.from)} to ${label(edge.to)} ${rate(edge.rate)}`).join(", ")));
    const lines = draw("g", {}), texts = draw("g", {});
    for (const edge of frame.edges) {
      const a = places.get(edge.from), b = places.get(edge.to);
      if (!a || !b) continue;
      const same = a.x === b.x;
      const x1 = a.x + WIDTH, y1 = a.y + HEIGHT / 2, x2 = same ? b.x + WIDTH : b.x, y2 = b.y + HEIGHT / 2, bend = same ? 46 : (x2 - x1) / 2;
      const path = same ? `M${x1},${y1}C${x1 + bend},${y1} ${x2 + bend},${y2} ${x2},${y2}` : `M${x1},${y1}C${x1 + bend},${y1} ${x2 - bend},${y2} ${x2},${y2}`;
      lines.append(draw("path", { d: path, class: "edge-line" + (edge.rate > 0 ? " flows" : "") }));
      texts.append(draw("text", { x: same ? x1 + 36 : (x1 + x2) / 2, y: (y1 + y2) / 2 + 4, class: "rate", "text-anchor": "middle" }, rate(edge.rate)));
    }
    svg.append(lines);
    for (const { x, y, node } of places.values()) {
      const group = draw("g", { class: `node ${node.state}${node.column ? "" : " source"}`, transform: `translate(${x},${y})`, "data-id": node.id });
      group.append(draw("rect", { class: "box", width: WIDTH, height: HEIGHT, rx: 8 }), draw("rect", { class: "edge", x: 0.5, y: 9, width: 4, height: HEIGHT - 18, rx: 2 }));
      group.append(draw("text", { x: 15, y: node.detail ? 21 : 30 }, short(node.label, 22)));
      if (node.detail) group.append(draw("text", { x: 15, y: 38, class: "detail" }, short(node.detail, 27)));
      group.append(draw("title", {}, `${node.label}: ${node.detail || node.state}`));
      svg.append(group);
    }
    svg.append(texts);
    host.replaceChildren(svg);
  };
  const label = (id) => id.slice(id.indexOf("/") + 1);
  const short = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);

  const drawBand = () => {
    const times = columns[T], states = columns[BAND], width = 1000;
    const svg = draw("svg", { viewBox: `0 0 ${width} 26`, preserveAspectRatio: "none", "aria-hidden": "true" });
    const first = times[0], span = Math.max(60, times[times.length - 1] - first);
    for (let start = 0, at = 1; at <= times.length; at++) {
      if (at === times.length || states[at] !== states[start]) {
        const end = at === times.length ? times[at - 1] + 1 : times[at];
        svg.append(draw("rect", { x: ((times[start] - first) / span) * width, y: 0, width: Math.max(1, ((end - times[start]) / span) * width), height: 26, class: "f" + (states[start] || 0) }));
        start = at;
      }
    }
    $("band").replaceChildren(svg);
    $("band").setAttribute("aria-label", "Destinations over the last " + duration(span) + ": now " + ["reachable", "trying again", "not reachable", "paused"][states[states.length - 1] || 0]);
  };

  const drawParts = (frame) => {
    const rows = frame.queues.filter((queue) => queue.parts.length > 1).slice(0, 8);
    $("s-parts").hidden = !rows.length;
    $("parts").replaceChildren(...rows.map((queue) => {
      const row = make("div", "heat-row"), heat = make("div", "heat"), count = queue.parts.length;
      const fullest = Math.max(...queue.parts.map((part) => part[0]));
      heat.setAttribute("role", "img");
      heat.setAttribute("aria-label", `${queue.name}: ${count} partitions, the fullest at ${Math.round(fullest * 100)} percent`);
      queue.parts.forEach(([fill, owner], index) => {
        const grade = fill > 0.8 ? 4 : fill > 0.5 ? 3 : fill > 0.2 ? 2 : fill > 0 ? 1 : 0;
        const cell = make("i", "g" + grade, count <= 32 ? String(owner) : "");
        cell.title = `partition ${index}: ${Math.round(fill * 100)} % full, worker ${owner}`;
        heat.append(cell);
      });
      row.append(make("span", "", queue.name + (queue.more_parts ? ` (first ${count})` : "")), heat);
      return row;
    }));
  };

  const lists = (frame) => {
    table($("queues"), [["Queue"], ["In"], ["Out"], ["Waiting"], ["Fill"], ["Oldest"], ["Wait p95"], ["Workers busy"], ["Failed"], ["Lost"]],
      frame.queues.map((q) => [[q.name, "", q.state], rate(q.in), rate(q.out), number(q.waiting), Math.round(q.fill * 100) + " %", duration(q.oldest), duration(q.wait_p95), `${q.busy} / ${q.workers}`, [number(q.failed), q.failed ? "bad" : ""], [number(q.lost), q.lost ? "bad" : ""]]));
    $("s-workers").hidden = !frame.queues.length;
    put($("more-queues"), frame.more_queues ? `${frame.more_queues} more queues are not shown; those with a problem and the busiest come first.` : "");
    const any = frame.exporters.length > 0;
    $("s-queue").hidden = $("s-breaker").hidden = !any;
    if (any) {
      table($("exporters"), [["Exporter"], ["Breaker", "left"], ["Delivered"], ["Waiting"], ["Fill"], ["Workers"], ["Next try"]],
        frame.exporters.map((e) => [[`${e.name} → ${e.sink}`, "", e.state], [e.paused ? "paused" : e.breaker.replace("_", " "), "left" + (e.breaker === "open" || e.paused ? " bad" : "")], rate(e.out), number(e.records), Math.round(e.fill * 100) + " %", `${e.busy} / ${e.workers}`, e.next === null ? "now" : e.next > 0 ? "in " + duration(e.next) : "–"]));
      const kinds = Object.entries(frame.failures).sort((a, b) => b[1] - a[1]);
      put($("failures"), kinds.length ? "Failed sends by kind: " + kinds.map(([kind, count]) => `${kind} ${number(count)}`).join(", ") + "." : "");
      put($("eta"), frame.exporters.slice(0, 4).filter((e) => e.records).map((e) => `${e.name}: ${number(e.records)} records, ${size(e.bytes)} of ${size(e.limit)}; ` + (known(e.empty_in) ? `empty in ${duration(e.empty_in)}.` : known(e.full_in) ? `full in ${duration(e.full_in)}.` : "it does not shrink.")).join(" "));
    }
    $("s-disks").hidden = !frame.disks.length;
    table($("disks"), [["Exporter or directory"], ["Used"], ["Quota"], ["Free on the file system"], ["Segments"], ["Sync p50"], ["Sync p99"]],
      frame.disks.map((d) => [[d.name, "", d.state], size(d.used), known(d.limit) ? size(d.limit) : "none", size(d.free), number(d.segments), duration(d.sync_p50), duration(d.sync_p99)]));
    $("s-dead").hidden = !frame.dead.length;
    put($("dead-kinds"), Object.entries(frame.dead_kinds).map(([kind, count]) => `${kind}: ${number(count)}`).join(", "));
    table($("dead"), [["Time"], ["Exporter", "left"], ["Records"], ["Reason", "left"]], frame.dead.map((d) => [clock(d.at), [d.exporter, "left"], number(d.records), [d.reason, "left wide"]]));
    put($("put-back-note"), frame.put_back.length
      ? "To put them back once the cause is fixed, run here, as the user of this process:"
      : "This process takes no commands: serve unix: as well, or put them back by exporter.requeue_dead_letters().");
    if (frame.put_back.join("\n") !== commands) {
      commands = frame.put_back.join("\n");
      $("put-back").replaceChildren(...frame.put_back.map((line) => { const item = make("li"); item.append(make("code", "", line)); return item; }));
    }
    $("s-queries").hidden = !frame.queries.length;
    table($("queries"), [["Query"], ["State", "left"], ["Rows"], ["Rows/s"], ["Batch"], ["Lag"], ["Behind"]],
      frame.queries.map((q) => [[q.name, "", q.state], [q.word, "left"], number(q.rows), rate(q.rate), duration(q.batch), duration(q.lag), number(q.behind)]));
    $("s-consumers").hidden = !frame.consumers.length;
    table($("consumers"), [["Consumer"], ["Kind", "left"], ["State", "left"], ["Received"], ["Lag"]],
      frame.consumers.map((c) => [[c.name, "", c.state], [c.kind, "left"], [c.word, "left"], number(c.received), number(c.lag)]));
  };

  const problems = (frame) => {
    $("s-problems").hidden = !frame.problems.length;
    $("problems").replaceChildren(...frame.problems.map((problem) => {
      const item = make("li", problem.state), line = make("div");
      line.append(make("b", "", problem.component.replace("/", " ")), document.createTextNode(`${problem.text}, for ${duration(Math.max(1, Math.round(frame.t - problem.since)))} now${problem.detail ? ": " + problem.detail : ""}.`));
      item.append(line);
      if (problem.error) item.append(make("p", "", "Last error: " + problem.error));
      if (problem.advice) item.append(make("p", "", "What to do: " + problem.advice + "."));
      return item;
    }));
  };

  const events = (frame) => {
    if (!frame.events.length) return;
    $("events").replaceChildren(...frame.events.map((event) => {
      const item = make("li"), time = make("time", "", clock(event.at));
      time.dateTime = new Date(event.at * 1000).toISOString();
      item.append(time, make("span", "state " + event.state, `${event.component.replace("/", " ")} ${event.text}`));
      return item;
    }));
  };

  const show = (frame) => {
    $("top").dataset.state = frame.state;
    put($("sentence"), frame.sentence);
    const heading = frame.problems.map((problem) => problem.component + " " + problem.state).join(", ") || "all is well";
    if (heading !== announced) { announced = heading; put($("announce"), heading); }
    document.title = (frame.state === "ok" ? "" : frame.state === "down" ? "✖ " : "▲ ") + "batchqueue";
    put($("lag"), duration(frame.lag));
    $("lag").className = frame.lag > 1 ? "bad" : "";
    put($("uptime"), duration(Math.floor(frame.uptime)));
    put($("pid"), String(frame.pid));
    put($("version"), frame.version);
    CARDS.forEach(([, text, className], index) => {
      put(cards[index].lastChild, text(frame));
      cards[index].className = "card " + (className ? className(frame) : "");
    });
    problems(frame);
    drawGraph(frame);
    lists(frame);
    drawParts(frame);
    events(frame);
    drawBand();
    for (const chart of charts) chart.update();
  };

  const point = (frame) => {
    const worst = (rows, key) => rows.reduce((most, row) => (known(row[key]) && (!known(most) || row[key] > most) ? row[key] : most), null);
    const band = (e) => (e.paused ? 3 : e.breaker === "open" ? 2 : e.breaker === "half_open" || e.state === "degraded" ? 1 : 0);
    return [frame.t, frame.cards.in, frame.cards.out, frame.cards.send_queue, frame.cards.send_queue_bytes, frame.cards.send_queue_limit,
      ...["wait_p50", "wait_p95", "wait_p99"].map((key) => worst(frame.queues, key)), ...["send_p50", "send_p95", "send_p99"].map((key) => worst(frame.exporters, key)),
      frame.exporters.reduce((most, each) => Math.max(most, band(each)), 0)];
  };
  const add = (values) => {
    if (columns[T].length && values[T] <= columns[T][columns[T].length - 1]) return;
    values.forEach((value, index) => columns[index].push(value));
    if (columns[T].length > MOST) for (const column of columns) column.shift();
  };

  // -- what comes in -------------------------------------------------------------------------------------------
  const source = new EventSource("events");
  source.addEventListener("history", (event) => { for (const values of JSON.parse(event.data)) add(values); });
  source.onmessage = (event) => {
    heard = Date.now();
    last = JSON.parse(event.data);
    add(point(last));
    if (!paused && !document.hidden) show(last);
  };
  setInterval(() => {
    if (heard && Date.now() - heard > 4000) {
      $("top").dataset.state = "lost";
      put($("sentence"), `No answer from the process for ${duration((Date.now() - heard) / 1000)}.`);
    }
  }, 1000);
  document.addEventListener("visibilitychange", () => { if (!document.hidden && last && !paused) show(last); });

  $("pause").addEventListener("click", () => {
    paused = !paused;
    $("pause").setAttribute("aria-pressed", String(paused));
    put($("pause"), paused ? "Paused" : "Pause");
    if (!paused && last) show(last);
  });
  const themes = ["auto", "light", "dark"];
  let theme = localStorage.getItem("batchqueue-theme") || "auto";
  const dress = () => {
    if (theme === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = theme;
    put($("theme"), "Theme: " + theme);
    for (const chart of charts) { chart.build(); if (columns[T].length) chart.update(); }
  };
  $("theme").addEventListener("click", () => { theme = themes[(themes.indexOf(theme) + 1) % 3]; localStorage.setItem("batchqueue-theme", theme); dress(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", dress);
  let resizing = 0;
  addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(() => { for (const chart of charts) chart.resize(); if (last) drawGraph(last); }, 100); });
  dress();
})();
