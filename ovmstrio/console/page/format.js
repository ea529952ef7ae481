// Number formatting.

export function rate(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  if (value < 10) return value.toFixed(1);
  return count(Math.round(value));
}

export function count(value) {
  if (value === null || value === undefined) return "–";
  if (value < 10000) return String(value);
  if (value < 1e6) return (value / 1e3).toFixed(value < 1e5 ? 1 : 0) + "k";
  if (value < 1e9) return (value / 1e6).toFixed(1) + "M";
  return (value / 1e9).toFixed(1) + "G";
}

export function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return Math.round(value * 1000) + " µs";
  if (value < 10) return value.toFixed(2) + " ms";
  if (value < 100) return value.toFixed(1) + " ms";
  if (value < 10000) return Math.round(value) + " ms";
  return (value / 1000).toFixed(1) + " s";
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  let size = value;
  for (const unit of ["B", "KB", "MB", "GB", "TB"]) {
    if (size < 1000 || unit === "TB") return (unit === "B" || size >= 100 ? Math.round(size) : size.toFixed(1)) + " " + unit;
    size /= 1024;
  }
  return "";
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 60) return value.toFixed(value < 10 ? 1 : 0) + " s";
  if (value < 3600) return Math.floor(value / 60) + " min " + Math.round(value % 60) + " s";
  return Math.floor(value / 3600) + " h " + Math.round((value % 3600) / 60) + " min";
}

export function clock(at) {
  const date = new Date(at * 1000);
  const two = (number) => String(number).padStart(2, "0");
  return two(date.getHours()) + ":" + two(date.getMinutes()) + ":" + two(date.getSeconds());
}

export function plural(number, one, many) {
  return number + " " + (number === 1 ? one : many || one + "s");
}
