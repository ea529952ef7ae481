// Points of charts, ordered by their times.

const SECONDS = 3600;

// Index of the first point after a time, in points ordered by their times.
export function after(points, time) {
  let [low, high] = [0, points.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle].at > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

// Points of one hour: those of the server, and the newer and finer ones that this page received.
export function history() {
  let points = [];
  return {
    get points() { return points; },
    add(point) {
      points.push(point);
      while (points.length && points[0].at < point.at - SECONDS) points.shift();
    },
    // Fills times of which this page has no points with the series of the server.
    merge({ seconds, end, series }) {
      const names = Object.keys(series);
      const count = names.length ? series[names[0]].length : 0;
      const found = [];
      for (let index = 0; index < count; index++) {
        const at = end - (count - 1 - index) * seconds;
        const own = after(points, at - seconds);
        if (own < points.length && points[own].at <= at) continue;
        found.push(Object.fromEntries([["at", at], ...names.map((name) => [name, series[name][index]])]));
      }
      points = [...found, ...points].sort((a, b) => a.at - b.at);
    },
  };
}
