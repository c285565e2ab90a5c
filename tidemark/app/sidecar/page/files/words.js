// Figures as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

// `seconds` in the two largest units that say something.
export function age(seconds) {
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return pair(Math.floor(s / 60), "min", s % 60, "s", s < 600);
  if (s < 86400) return pair(Math.floor(s / 3600), "h", Math.floor((s % 3600) / 60), "min", true);
  return pair(Math.floor(s / 86400), "d", Math.floor((s % 86400) / 3600), "h", true);
}

function pair(large, unit, small, smaller, both) {
  return both && small ? `${large} ${unit} ${small} ${smaller}` : `${large} ${unit}`;
}

export function count(number) {
  return number < 100_000 ? whole.format(number) : short.format(number);
}

// A stream ID, whole: a Number or a BigInt.
export function grouped(id) {
  return whole.format(id);
}

export function rate(perSecond) {
  if (perSecond === 0) return "0";
  return perSecond < 9.95 ? perSecond.toFixed(1) : count(perSecond);
}

export function counted(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

export function clock(moment) {
  return new Date(moment).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
}
