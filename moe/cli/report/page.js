// Sorts the tables, and draws each figure's data (charts.cc) with Chart.js.
"use strict";
const problems = [];
addEventListener("error", (event) => problems.push("script error: " + event.message));

// Sorting is stable; cells without a value stay last. Numbers sort by data-value, texts as words.
function keyOf(row, column) {
  const cell = row.cells[column];
  return "value" in cell.dataset ? cell.dataset.value : cell.textContent;
}
function sortTable(table, column, descending) {
  const body = table.tBodies[0];
  const rows = Array.from(body.rows);
  const numeric = rows.length > 0 && "value" in rows[0].cells[column].dataset;
  rows.sort((a, b) => {
    const x = keyOf(a, column), y = keyOf(b, column);
    if (x === "" || y === "") return (x === "") - (y === "");
    const order = numeric ? x - y : x.localeCompare(y, "en", {numeric: true});
    return descending ? -order : order;
  });
  body.append(...rows);
}
for (const table of document.querySelectorAll("table")) {
  const heads = Array.from(table.tHead.rows[0].cells);
  heads.forEach((head, column) => head.firstChild.addEventListener("click", () => {
    const descending = head.ariaSort === "ascending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    sortTable(table, column, descending);
  }));
}

// How series look: eight colours, six shapes (with rotation and radius) and four patterns of dashes, in turn.
const SHAPES = [["circle", 0, 4.5], ["rect", 0, 5.5], ["triangle", 0, 5.5], ["rectRot", 0, 5.5],
                ["triangle", 180, 5.5], ["cross", 0, 5.5]];
const DASHES = [[], [9, 3], [3, 3], [10, 3, 2, 3]];
// cividis (Nunez, Anderton, Renslow 2018): its lightness grows evenly for all kinds of colour vision.
const CIVIDIS = ["00224e", "123570", "3b496c", "575d6d", "707173", "8a8678", "a59c74", "c3b369", "e1cc55",
                 "fee838"];
const ROW_HEIGHT = 38;

const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const colourOf = (series) => ink(series.faint ? "faint" : "s" + series.look % 8);
const isLog = (axis) => axis.kind === "log" || axis.kind === "bytes";

function heatColour(share) {
  const at = Math.min(Math.max(share, 0), 1) * (CIVIDIS.length - 1);
  const below = Math.min(Math.floor(at), CIVIDIS.length - 2);
  const channels = (stop) => [0, 2, 4].map((i) => parseInt(CIVIDIS[stop].slice(i, i + 2), 16));
  const high = channels(below + 1);
  const mixed = channels(below).map((low, i) => Math.round(low + (at - below) * (high[i] - low)));
  return `rgb(${mixed})`;
}

// Texts of numbers.
function numberText(value, digits = 5) {
  if (Number.isInteger(value) && Math.abs(value) < 1e12) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size < 1e-4 || size >= 1e12 ? value.toExponential(digits - 1)
                                     : value.toLocaleString("en", {maximumSignificantDigits: digits});
}
function bytesText(value) {
  const power = Math.min(4, Math.max(0, Math.floor(Math.log2(value) / 10)));
  return numberText(value / 1024 ** power, 4) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][power];
}
function valueText(axis, value, error) {
  if (axis.names) return axis.names[value];
  const text = axis.kind === "bytes" ? bytesText(value) : numberText(value);
  return error > 0 ? text + " ± " + numberText(error, 2) : text;
}

// Ticks of a logarithmic axis at `factors` times powers of `base`, from the last that is not above `low`
// to the first that is not below `high`, at least two.
function logTicks(low, high, base, factors) {
  const power = (value) => Math.floor(Math.log(value) / Math.log(base) + 1e-9);
  const ticks = [];
  for (let p = power(low); p <= power(high) + 1; ++p) {
    ticks.push(...factors.map((factor) => factor * base ** p));
  }
  const first = ticks.filter((tick) => tick <= low * (1 + 1e-9)).length - 1;
  const last = Math.max(first + 1, ticks.findIndex((tick) => tick >= high * (1 - 1e-9)));
  return ticks.slice(first, last + 1);
}

// Chart.js's scale of an axis whose values and whiskers are in [low, high].
function scaleOf(axis, low, high) {
  const scale = {
    type: isLog(axis) ? "logarithmic" : "linear", beginAtZero: axis.zero === true,
    suggestedMin: low, suggestedMax: high, offset: false, grid: {offset: false},
    title: {display: axis.label !== "", text: axis.label, color: ink("faint")},
    ticks: {maxRotation: 0, autoSkipPadding: 12, maxTicksLimit: 7}};
  if (axis.kind === "whole") scale.ticks.precision = 0;
  if (!isLog(axis) && !axis.names) return scale;
  let ticks = axis.names?.map((_, i) => i);
  if (axis.kind === "log") ticks = logTicks(low, high, 10, high / low < 100 ? [1, 2, 5] : [1]);
  if (axis.kind === "bytes") ticks = logTicks(low, high, 2, [1]);
  const room = axis.names ? 0.5 : 0;
  scale.min = ticks[0] - room;
  scale.max = ticks[ticks.length - 1] + room;
  scale.afterBuildTicks = (built) => { built.ticks = ticks.map((value) => ({value})); };
  scale.ticks.callback = (value) => valueText(axis, value);
  delete scale.ticks.maxTicksLimit;
  return scale;
}

// An axis of names from the top down, each above its bar, so that long ones take no width from it.
function rowScale(axis) {
  const scale = scaleOf(axis);
  Object.assign(scale, {reverse: true, grid: {display: false, drawBorder: false}});
  Object.assign(scale.ticks, {
    mirror: true, labelOffset: -ROW_HEIGHT / 2 + 2, autoSkip: false, padding: 0, z: 1,
    callback(value) {
      const most = Math.floor(this.chart.width / 7.5), name = Array.from(axis.names[value]);
      return name.length <= most ? name.join("") : name.slice(0, most - 1).join("") + "…";
    }});
  return scale;
}

// The y axis has its label level above it: no head has to be turned, and no width is lost.
function labelAbove(label) {
  return {display: label !== "", text: label, align: "start", color: ink("faint"), font: {weight: "normal"},
          padding: {top: 0, bottom: 8}};
}

function pointsDataset(series, index, stepped) {
  const colour = colourOf(series);
  const [pointStyle, pointRotation, radius] = SHAPES[series.look % SHAPES.length];
  const dashes = {line: DASHES[series.look % DASHES.length], limit: [7, 5]};
  const outlined = pointStyle !== "cross"; // which is all outline
  const dataset = {
    label: series.name, data: series.points, parsing: false, clip: false, order: -index,
    showLine: series.style !== "points", borderColor: colour, borderWidth: 2,
    borderDash: dashes[series.style] ?? [], pointStyle, pointRotation, pointRadius: radius,
    pointHoverRadius: radius + 0.5, pointHitRadius: 8, pointBackgroundColor: colour,
    pointBorderColor: outlined ? ink("paper") : colour, pointBorderWidth: outlined ? 1 : 2.5};
  if (series.style === "line" || series.style === "limit") {
    // One value alone is still seen: of a limit as a line across the frame, of a curve as a dot.
    const alone = series.points.length === 1;
    dataset.across = alone && series.style === "limit";
    dataset.pointRadius = dataset.pointHoverRadius = alone && !dataset.across ? 2.5 : 0;
  }
  if (series.style === "front") {
    Object.assign(dataset, {
      stepped, order: 1, borderColor: ink("faint"), borderWidth: 1.5, borderDash: [2, 3], pointRadius: 8,
      pointHoverRadius: 8, pointBackgroundColor: "transparent", pointBorderColor: ink("text"),
      pointBorderWidth: 1.5});
  }
  return dataset;
}

// The least and the largest of a value with its whiskers. One that reaches 0 has no end on a logarithmic axis.
function extent(series, value, error, log) {
  const ends = series.flatMap((s) => s.points).flatMap((p) => {
    const half = p[error] ?? 0, low = p[value] - half;
    return [log && low <= 0 ? p[value] : low, p[value] + half];
  });
  return ends.reduce(([low, high], end) => [Math.min(low, end), Math.max(high, end)], [Infinity, -Infinity]);
}

function tooltipOf({x, y, series}) {
  const title = y.names ? (raw) => y.names[raw.y] : (raw) => `${x.label}: ${valueText(x, raw.x, raw.dx)}`;
  const text = y.names ? (raw) => valueText(x, raw.x, raw.dx) : (raw) => valueText(y, raw.y, raw.dy);
  return {
    filter: (item) => series[item.datasetIndex].style !== "front",
    itemSort: (a, b) => a.datasetIndex - b.datasetIndex,
    callbacks: {title: ([first]) => first ? title(first.raw) : "",
                label: ({raw, dataset}) => `${raw.name ?? dataset.label}: ${text(raw)}`}};
}

function xyConfig(data) {
  const {x, y, series} = data;
  const scales = {x: scaleOf(x, ...extent(series, "x", "dx", isLog(x)))};
  scales.y = y.names ? rowScale(y) : scaleOf(y, ...extent(series, "y", "dy", isLog(y)));
  scales.y.title.display = false;
  if (y.names) scales.x.grid.color = ({tick}) => ink(tick?.value === 0 ? "faint" : "line");
  const lines = series.some((s) => s.style === "line" || s.style === "line-points");
  return {
    type: "line", data: {datasets: series.map((s, i) => pointsDataset(s, i, data.stepped))},
    plugins: [whiskers, labels],
    options: {
      scales, plugins: {title: labelAbove(y.label), tooltip: tooltipOf(data)},
      interaction: {mode: "nearest", axis: lines ? "x" : "xy", intersect: !lines}}};
}

function barsConfig({x, y, unit, series}) {
  const share = ({raw, dataset}) => {
    const whole = series.reduce((sum, part) => sum + part.values[raw.y], 0);
    const of = `, ${numberText(100 * raw.x / whole, 3)} % of ${numberText(whole, 4)} ${unit}`;
    return `${dataset.label}: ${numberText(raw.x, 4)} ${unit}${raw.x === whole ? "" : of}`;
  };
  const scales = {x: scaleOf(x), y: rowScale(y)};
  scales.x.stacked = scales.y.stacked = true;
  const datasets = series.map((part) => ({
    label: part.name, backgroundColor: colourOf(part), borderColor: ink("paper"), borderWidth: 1,
    borderSkipped: false, barThickness: 16,
    data: part.values.map((value, row) => ({x: value, y: row})).filter((bar) => bar.x > 0)}));
  const callbacks = {title: ([first]) => y.names[first.raw.y], label: share};
  return {type: "bar", data: {datasets}, options: {indexAxis: "y", scales, plugins: {tooltip: {callbacks}}}};
}

// Cells are bars that are as wide and as high as their place.
function cellsConfig(data) {
  const {x, y, values} = data;
  const largest = largestOf(data), columns = x.names.length;
  const cells = values.map((value, i) => ({value, x: i % columns, row: Math.floor(i / columns)}))
      .filter((cell) => cell.value !== null)
      .map((cell) => ({...cell, y: [cell.row - 0.5, cell.row + 0.5]}));
  const scales = {x: scaleOf(x), y: scaleOf(y)};
  scales.x.grid.display = scales.y.grid.display = false;
  scales.y.reverse = true;
  scales.y.title.display = false;
  const callbacks = {
    title: ([{raw}]) => `${y.label} ${y.names[raw.row]}, ${x.label} ${x.names[raw.x]}`,
    label: ({raw}) => `${data.label}: ${numberText(raw.value, 3)}`};
  return {
    type: "bar",
    data: {datasets: [{data: cells, backgroundColor: cells.map((cell) => heatColour(cell.value / largest)),
                       barPercentage: 1, categoryPercentage: 1}]},
    options: {scales, plugins: {title: labelAbove(y.label), tooltip: {callbacks}}}};
}
function largestOf(data) {
  return data.values.reduce((most, value) => Math.max(most, value ?? 0), 2 * data.middle) || 1;
}

// The ends of a point's whiskers in pixels. On a logarithmic axis one may have no lower end: the frame.
function endsOf({x, y}, point) {
  const pixel = (scale, value) => scale.getPixelForValue(Math.max(value, scale.min));
  const dx = point.dx ?? 0, dy = point.dy ?? 0;
  return {left: pixel(x, point.x - dx), right: pixel(x, point.x + dx),
          top: pixel(y, point.y + dy), bottom: pixel(y, point.y - dy)};
}
const whiskers = {
  id: "whiskers",
  beforeDatasetDraw({ctx, data, scales, chartArea}, {index, meta}) {
    const dataset = data.datasets[index];
    ctx.save();
    ctx.strokeStyle = dataset.borderColor;
    ctx.lineWidth = 2;
    ctx.beginPath();
    dataset.data.forEach((point, i) => {
      const {x, y} = meta.data[i], {left, right, top, bottom} = endsOf(scales, point);
      ctx.moveTo(left, y);
      ctx.lineTo(right, y);
      ctx.moveTo(x, top);
      ctx.lineTo(x, bottom);
      if (!dataset.across) return;
      ctx.setLineDash(dataset.borderDash);
      ctx.moveTo(chartArea.left, y);
      ctx.lineTo(chartArea.right, y);
    });
    ctx.stroke();
    ctx.restore();
  }};

// Names beside points: to the right, left, above or below, whichever is free; else nowhere.
const labels = {
  id: "labels",
  afterDatasetsDraw(chart) {
    const {ctx, chartArea, scales, width} = chart;
    const boxOf = (a, b) => ({left: Math.min(a.x, b.x), right: Math.max(a.x, b.x),
                              top: Math.min(a.y, b.y), bottom: Math.max(a.y, b.y)});
    const points = [], taken = [];
    chart.data.datasets.forEach((dataset, d) => dataset.data.forEach((point, i) => {
      const elements = chart.getDatasetMeta(d).data, {x, y} = elements[i];
      const before = dataset.stepped && elements[i - 1];
      points.push({x, y, label: point.label});
      taken.push({left: x - 9, top: y - 9, right: x + 9, bottom: y + 9}, endsOf(scales, point));
      if (!before) return;
      const corner = dataset.stepped === "after" ? {x: before.x, y} : {x, y: before.y};
      taken.push(boxOf(before, corner), boxOf(corner, {x, y}));
    }));
    const free = (box) => !taken.some((other) => box.left < other.right && other.left < box.right &&
                                                 box.top < other.bottom && other.top < box.bottom);
    ctx.save();
    ctx.font = Chart.helpers.toFont({...Chart.defaults.font, size: 12}).string;
    ctx.fillStyle = ink("text");
    ctx.textBaseline = "middle";
    for (const {x, y, label} of points) {
      if (!label) continue;
      const long = ctx.measureText(label).width;
      const box = [[x + 11, y], [x - 11 - long, y], [x - long / 2, y - 17], [x - long / 2, y + 17]]
          .map(([left, middle]) => ({left, top: middle - 7, right: left + long, bottom: middle + 7}))
          .find((at) => at.left >= chartArea.left && at.right <= width && at.top >= chartArea.top - 4 &&
                        at.bottom <= chartArea.bottom && free(at));
      if (!box) continue;
      taken.push(box);
      ctx.fillText(label, box.left, box.top + 7);
    }
    ctx.restore();
  }};

// The legend is text below the drawing, so that it wraps on a phone.
function element(tag, classes, ...children) {
  const made = document.createElement(tag);
  made.className = classes;
  made.append(...children);
  return made;
}
function keyOfSeries(series) {
  const key = element("canvas", "key"), ctx = key.getContext("2d");
  key.width = 44;
  key.height = 28;
  ctx.scale(2, 2);
  if (series.values) {
    ctx.fillStyle = colourOf(series);
    ctx.fillRect(4, 0, 14, 14);
    return key;
  }
  const look = pointsDataset(series, 0);
  if (look.showLine) {
    ctx.strokeStyle = look.borderColor;
    ctx.lineWidth = 2;
    ctx.setLineDash(look.borderDash);
    ctx.moveTo(0, 7);
    ctx.lineTo(22, 7);
    ctx.stroke();
    ctx.setLineDash([]);
  }
  if (look.pointRadius > 4) {
    ctx.fillStyle = look.pointBackgroundColor;
    ctx.strokeStyle = look.pointBorderColor;
    const {pointStyle, pointRotation: rotation, pointRadius: radius, pointBorderWidth: borderWidth} = look;
    Chart.helpers.drawPoint(ctx, {pointStyle, rotation, radius, borderWidth}, 11, 7);
  }
  return key;
}
function legendOf(data) {
  if (data.kind === "cells") {
    const bar = element("div", "colours"), middle = element("i", "");
    bar.style.background = `linear-gradient(90deg, ${CIVIDIS.map((stop) => "#" + stop)})`;
    middle.style.left = 100 * data.middle / largestOf(data) + "%";
    if (data.middle > 0) bar.append(middle);
    const ends = [`${data.label}: 0`, numberText(largestOf(data), 3)];
    return element("ul", "legend", element("li", "", ends[0], bar, ends[1]));
  }
  const shown = data.series.filter((series) => series.style !== "front");
  const named = shown.length < 2 && data.kind === "xy" && !data.y.names; // by the heading
  if (named) return element("ul", "legend");
  const items = shown.map((series) => element("li", "", keyOfSeries(series), series.name));
  return element("ul", "legend", ...items);
}

const CONFIGS = {xy: xyConfig, bars: barsConfig, cells: cellsConfig};
let charts = [];
function drawFigure(figure) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const drawing = figure.querySelector(".drawing");
  const rows = data.kind === "cells" ? 0 : data.y.names?.length ?? 0;
  if (rows > 0) drawing.style.height = rows * ROW_HEIGHT + 56 + "px";
  figure.querySelector(".legend")?.remove();
  drawing.after(legendOf(data));
  return new Chart(drawing.firstChild, CONFIGS[data.kind](data));
}
function draw() {
  charts.forEach((chart) => chart.destroy());
  Object.assign(Chart.defaults, {
    animation: false, maintainAspectRatio: false, locale: "en", color: ink("text"), borderColor: ink("line"),
    devicePixelRatio: Math.max(2, devicePixelRatio)}); // sharp on paper, too
  Object.assign(Chart.defaults.font, {family: getComputedStyle(document.body).fontFamily, size: 13});
  Chart.defaults.plugins.legend.display = false;
  charts = Array.from(document.querySelectorAll(".chart"), (figure) => {
    try {
      return drawFigure(figure);
    } catch (error) {
      problems.push(`${figure.id}: ${error.message}`);
      return null;
    }
  }).filter((chart) => chart !== null);
}
draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
// Paper is white, and narrower than a window.
for (const [event, printed] of [["beforeprint", true], ["afterprint", false]]) {
  addEventListener(event, () => {
    document.documentElement.classList.toggle("printed", printed);
    draw();
  });
}

// Says in attributes of <html> whether the page is whole: data-charts, data-marks and data-tables count
// what is there, and data-check is "ok", or what is wrong: an error, or values that have no mark.
function marksOf(chart) {
  const {left, right, top, bottom} = chart.chartArea;
  return chart.getSortedVisibleDatasetMetas().flatMap((meta) => meta.data).filter(
      ({x, y}) => x >= left - 1 && x <= right + 1 && y >= top - 1 && y <= bottom + 1).length;
}
addEventListener("load", () => {
  let marks = 0;
  for (const chart of charts) {
    const drawn = marksOf(chart);
    const values = chart.data.datasets.reduce((sum, dataset) => sum + dataset.data.length, 0);
    marks += drawn;
    if (drawn === 0 || drawn !== values) {
      problems.push(`${chart.canvas.closest("figure").id}: ${drawn} marks of ${values} values`);
    }
  }
  Object.assign(document.documentElement.dataset, {
    charts: charts.length, marks, tables: document.querySelectorAll("table").length,
    check: problems.length === 0 ? "ok" : problems.join("; ")});
});
