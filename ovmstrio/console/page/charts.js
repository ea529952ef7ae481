// Small charts of the last five minutes, with the current values as text.

import { h, s, setText } from "./dom.js";

const WIDTH = 320;
const HEIGHT = 88;
const LEFT = 4;
const LEAST = 60;

function niceTop(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}

// series: [{ key, title, kind, value(point) }]; show: formats a value.
export function chart(title, series, show) {
  const lines = series.map((each) => s("path.line." + each.kind, {}));
  const grid = [0.5, 1].map((part) => s("line.grid", { x1: 0, x2: WIDTH, y1: HEIGHT * (1 - part) + 0.5, y2: HEIGHT * (1 - part) + 0.5 }));
  const picture = s("svg.chart", { viewBox: "0 0 " + WIDTH + " " + HEIGHT, preserveAspectRatio: "none", role: "img" }, grid, lines);
  const scale = h("span.scale");
  const values = series.map((each) => h("b", {}, "–"));
  const element = h("figure.chart", {},
    h("figcaption", {}, h("span.name", {}, title), series.map((each, index) => h("span.key." + each.kind, {}, each.title ? each.title + " " : "", values[index]))),
    h("div.plot", {}, picture, scale));
  return {
    element,
    update(points, span) {
      let most = 0;
      for (const point of points) for (const each of series) most = Math.max(most, each.value(point) || 0);
      const limit = niceTop(most);
      // Stretch a short history: the axis covers one minute at least, the span at most.
      const step = (WIDTH - LEFT) / (Math.min(Math.max(points.length, LEAST), span) - 1);
      series.forEach((each, index) => {
        let path = "";
        let isOn = false;
        points.forEach((point, number) => {
          const value = each.value(point);
          if (value === null || value === undefined) { isOn = false; return; }
          const x = WIDTH - (points.length - 1 - number) * step;
          const y = HEIGHT - 1 - (value / limit) * (HEIGHT - 4);
          path += (isOn ? "L" : "M") + x.toFixed(1) + " " + y.toFixed(1);
          if (!isOn) path += "h0.01";
          isOn = true;
        });
        lines[index].setAttribute("d", path);
        const last = points.length ? each.value(points[points.length - 1]) : null;
        setText(values[index], last === null || last === undefined ? "–" : show(last));
      });
      setText(scale, show(limit));
      picture.setAttribute("aria-label", title + ", last five minutes, up to " + show(limit));
    },
  };
}
