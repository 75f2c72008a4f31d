"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const DASHES = ["", "7 3", "7 3 2 3", "2 3"];
  const hidden = new Set();
  const charts = [];

  // drawing

  function svg(name, attributes, parent) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (parent) parent.append(element);
    return element;
  }

  const colour = (series) => `var(--c${series % 7})`;
  const dash = (series) => DASHES[series % DASHES.length];

  // one shape a series, so that colour is not all that tells them apart
  function marker(series, x, y, parent) {
    const r = 3.4;
    const shapes = [
      () => svg("circle", { cx: x, cy: y, r }, parent),
      () => svg("rect", { x: x - r, y: y - r, width: 2 * r, height: 2 * r }, parent),
      () => svg("path", { d: `M${x},${y - 1.4 * r}l${1.4 * r},${1.4 * r}l${-1.4 * r},${1.4 * r}l${-1.4 * r},${-1.4 * r}z` }, parent),
      () => svg("path", { d: `M${x},${y - 1.3 * r}l${1.3 * r},${2.3 * r}h${-2.6 * r}z` }, parent),
      () => svg("path", { d: `M${x},${y + 1.3 * r}l${1.3 * r},${-2.3 * r}h${-2.6 * r}z` }, parent),
    ];
    const shape = shapes[series % shapes.length]();
    shape.style.fill = colour(series);
    return shape;
  }

  function line(points, series, className, parent) {
    const path = svg("path", { class: className, d: "M" + points.map((p) => p.join(",")).join("L") }, parent);
    path.style.stroke = colour(series);
    path.style.strokeDasharray = dash(series);
    path.dataset.series = series;
    return path;
  }

  function drawSwatch(element) {
    const series = Number(element.dataset.series);
    line([[0, 6], [28, 6]], series, "mean", element);
    marker(series, 14, 6, element);
  }

  function swatch(series) {
    const element = svg("svg", { class: "swatch", viewBox: "0 0 28 12", "aria-hidden": "true" });
    element.dataset.series = series;
    drawSwatch(element);
    return element;
  }

  // numbers

  function ticks(low, high, count) {
    const rough = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
    const found = [];
    for (let i = Math.ceil(low / step); i * step <= high + step * 1e-9; i++) found.push(i * step);
    return { found, digits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
  }

  function tokens(value) {
    for (const [size, unit] of [[1e9, " B"], [1e6, " M"], [1e3, " k"]]) {
      if (Math.abs(value) >= size) return Number((value / size).toPrecision(4)) + unit;
    }
    return String(value);
  }

  // charts

  class Chart {
    constructor(spec) {
      this.spec = spec;
      this.from = spec.zoom ? 0.1 : 0;
      this.figure = document.createElement("figure");
      this.figure.id = spec.id;
      const caption = document.createElement("figcaption");
      caption.append(spec.title);
      if (spec.zoom) caption.append(this.zoomChoice());
      this.svg = svg("svg", { class: "chart", tabindex: 0, role: "img", "aria-label": `${spec.title}: the arrow keys go from point to point` });
      this.tooltip = document.createElement("div");
      this.tooltip.className = "tooltip";
      this.tooltip.setAttribute("role", "status");
      this.tooltip.hidden = true;
      this.note = document.createElement("p");
      this.note.className = "note";
      this.figure.append(caption, this.svg, this.tooltip, this.note);
      this.svg.addEventListener("pointermove", (event) => this.point(event));
      this.svg.addEventListener("pointerleave", () => this.hide());
      this.svg.addEventListener("blur", () => this.hide());
      this.svg.addEventListener("keydown", (event) => this.key(event));
      new ResizeObserver(() => this.draw()).observe(this.svg);
    }

    zoomChoice() {
      const select = document.createElement("select");
      select.setAttribute("aria-label", `Part of the training shown: ${this.spec.title}`);
      for (const [from, label] of [[0, "whole training"], [0.1, "from 10 % on"], [0.5, "second half"], [0.9, "last tenth"]]) {
        select.append(new Option(label, from, from === this.from, from === this.from));
      }
      select.addEventListener("change", () => { this.from = Number(select.value); this.draw(); });
      return select;
    }

    draw() {
      this.hide();
      this.svg.replaceChildren();
      const { width, height } = this.svg.getBoundingClientRect();
      if (!width) return;
      const spec = this.spec;
      const all = spec.series.flatMap((s) => s.mean.map((p) => p[0]));
      const end = Math.max(...all);
      const start = spec.zoom ? this.from * end : Math.min(...all);
      const within = (points) => points.filter(([x]) => x >= start - 1e-9);
      this.visible = spec.series
        .filter((s) => !hidden.has(s.series))
        .map((s) => ({ ...s, mean: within(s.mean), seeds: s.seeds.map(within) }))
        // a diverged run has no number to draw
        .filter((s) => s.mean.some((p) => p[1] !== null));
      if (!this.visible.length) return;
      const xs = this.visible.flatMap((s) => s.mean.map((p) => p[0]));
      const ys = this.visible.flatMap((s) => [s.mean, ...s.seeds].flat().map((p) => p[1])).filter((y) => y !== null);
      let [x0, x1] = [Math.min(...xs, spec.zoom ? start : Infinity), Math.max(...xs)];
      let [y0, y1] = [Math.min(...ys), Math.max(...ys)];
      if (x0 === x1) [x0, x1] = [x0 - 1, x1 + 1];
      const pad = (y1 - y0 || 1) * 0.06;
      [y0, y1] = [y0 - pad, y1 + pad];
      const box = { left: 58, right: width - (spec.labels ? 30 : 16), top: 12, bottom: height - 40 };
      this.box = box;
      this.x = (v) => box.left + ((v - x0) / (x1 - x0)) * (box.right - box.left);
      this.y = (v) => box.bottom - ((v - y0) / (y1 - y0)) * (box.bottom - box.top);
      this.axes(x0, x1, y0, y1);
      for (const one of this.visible) {
        const place = (points) => points.filter((p) => p[1] !== null).map(([x, y]) => [this.x(x).toFixed(1), this.y(y).toFixed(1)]);
        if (one.seeds.length > 1) for (const seed of one.seeds) line(place(seed), one.series, "seed", this.svg);
        line(place(one.mean), one.series, "mean", this.svg);
        if (one.mean.length <= 24) {
          for (const [x, y] of one.mean) if (y !== null) marker(one.series, this.x(x), this.y(y), this.svg).dataset.series = one.series;
        }
      }
      this.stops = [...new Set(xs)].sort((a, b) => a - b);
      this.cursor = svg("g", {}, this.svg);
    }

    axes(x0, x1, y0, y1) {
      const { spec, box } = this;
      const vertical = ticks(y0, y1, 6);
      for (const value of vertical.found) {
        const y = this.y(value);
        svg("line", { class: "grid", x1: box.left, x2: box.right, y1: y, y2: y }, this.svg);
        svg("text", { class: "tick", x: box.left - 6, y: y + 4, "text-anchor": "end" }, this.svg).textContent = value.toFixed(vertical.digits).replace("-", "−");
      }
      const marks = spec.labels ? spec.labels.map((label, i) => [i, label]) : ticks(x0, x1, Math.max(2, Math.floor((box.right - box.left) / 90))).found.map((v) => [v, tokens(v)]);
      const every = spec.labels ? Math.ceil((48 * marks.length) / (box.right - box.left)) : 1;
      for (const [value, label] of marks.filter((_, i) => i % every === 0)) {
        const x = this.x(value);
        svg("line", { class: "grid", x1: x, x2: x, y1: box.top, y2: box.bottom }, this.svg);
        svg("text", { class: "tick", x, y: box.bottom + 16, "text-anchor": "middle" }, this.svg).textContent = label;
      }
      const middle = (box.top + box.bottom) / 2;
      svg("text", { class: "axis", x: (box.left + box.right) / 2, y: box.bottom + 34, "text-anchor": "middle" }, this.svg).textContent = spec.xlabel;
      svg("text", { class: "axis", x: 13, y: middle, "text-anchor": "middle", transform: `rotate(-90 13 ${middle})` }, this.svg).textContent = spec.ylabel;
      this.note.textContent = "";
      if (spec.reference) {
        const { label, y } = spec.reference;
        if (y > y0 && y < y1) {
          svg("line", { class: "reference", x1: box.left, x2: box.right, y1: this.y(y), y2: this.y(y) }, this.svg);
          svg("text", { class: "tick", x: box.right, y: this.y(y) - 5, "text-anchor": "end" }, this.svg).textContent = label;
        } else {
          this.note.textContent = `${label}, outside the part shown`;
        }
      }
    }

    // pointing

    point(event) {
      if (!this.stops) return;
      const at = event.clientX - this.svg.getBoundingClientRect().left;
      const distances = this.stops.map((x) => Math.abs(this.x(x) - at));
      this.show(distances.indexOf(Math.min(...distances)));
    }

    key(event) {
      if (!this.stops) return;
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") this.hide();
      if (!step) return;
      event.preventDefault();
      const last = this.stops.length - 1;
      this.show(this.at === undefined ? (step > 0 ? 0 : last) : Math.max(0, Math.min(last, this.at + step)));
    }

    show(index) {
      if (index === this.at) return;
      this.at = index;
      const value = this.stops[index];
      const x = this.x(value);
      this.cursor.replaceChildren();
      svg("line", { class: "cursor", x1: x, x2: x, y1: this.box.top, y2: this.box.bottom }, this.cursor);
      const lines = this.visible
        .map((s) => ({ series: s.series, y: (s.mean.find((p) => p[0] === value) || [])[1] }))
        .filter((s) => s.y !== undefined && s.y !== null)
        .sort((a, b) => b.y - a.y);
      const table = document.createElement("table");
      for (const { series, y } of lines) {
        marker(series, x, this.y(y), this.cursor);
        const row = table.insertRow();
        row.insertCell().append(swatch(series), data.mechanisms[series]);
        row.insertCell().textContent = y.toFixed(this.spec.digits).replace("-", "−");
      }
      const heading = document.createElement("strong");
      heading.textContent = this.spec.labels ? `${this.spec.at} ${this.spec.labels[value]}` : `${tokens(value)} ${this.spec.at}`;
      this.tooltip.replaceChildren(heading, table);
      this.tooltip.hidden = false;
      const space = this.figure.clientWidth;
      const right = x + 24 + this.tooltip.offsetWidth < space;
      this.tooltip.style.left = `${Math.max(4, right ? x + 24 : x - this.tooltip.offsetWidth - 4)}px`;
    }

    hide() {
      this.at = undefined;
      this.tooltip.hidden = true;
      if (this.cursor) this.cursor.replaceChildren();
    }

    // fade all but one series; null: none
    highlight(series) {
      for (const element of this.svg.querySelectorAll("[data-series]")) {
        element.classList.toggle("faded", series !== null && Number(element.dataset.series) !== series);
      }
    }
  }

  // legend

  function drawLegend() {
    const legend = document.getElementById("legend");
    data.mechanisms.forEach((name, series) => {
      const button = document.createElement("button");
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      button.append(swatch(series), name);
      button.addEventListener("click", () => {
        const now = !hidden.delete(series);
        if (now) hidden.add(series);
        button.setAttribute("aria-pressed", String(!now));
        for (const chart of charts) chart.draw();
      });
      for (const [event, on] of [["pointerenter", true], ["focus", true], ["pointerleave", false], ["blur", false]]) {
        button.addEventListener(event, () => charts.forEach((chart) => chart.highlight(on ? series : null)));
      }
      legend.append(button);
    });
  }

  // tables

  function number(text) {
    return parseFloat(text.replaceAll(",", "").replace("−", "-"));
  }

  function sortable(table) {
    const headings = [...table.tHead.rows[0].cells];
    headings.forEach((heading, column) => {
      heading.querySelector("button").addEventListener("click", () => {
        const up = heading.getAttribute("aria-sort") !== "ascending";
        for (const other of headings) other.removeAttribute("aria-sort");
        heading.setAttribute("aria-sort", up ? "ascending" : "descending");
        const rows = [...table.tBodies[0].rows].map((row) => {
          const text = row.cells[column].textContent.trim();
          return { row, text, value: number(text) };
        });
        const numeric = rows.some((one) => !Number.isNaN(one.value)) && column > 0;
        // what has no number stays at the end either way
        rows.sort((a, b) => {
          if (!numeric) return (up ? 1 : -1) * a.text.localeCompare(b.text);
          if (Number.isNaN(a.value) || Number.isNaN(b.value)) return Number.isNaN(a.value) - Number.isNaN(b.value);
          return (up ? 1 : -1) * (a.value - b.value);
        });
        table.tBodies[0].append(...rows.map((one) => one.row));
      });
    });
  }

  document.querySelectorAll("table.sortable").forEach(sortable);
  document.querySelectorAll("svg.swatch").forEach(drawSwatch);
  drawLegend();
  for (const spec of data.charts) {
    const chart = new Chart(spec);
    charts.push(chart);
    document.getElementById("charts").append(chart.figure);
  }
})();
