// Formats numbers, IDs and times for people.

const wholeNumber = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const compactNumber = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

// A duration in its two largest units, such as "3 min 20 s". The smaller unit is left out if it is insignificant.
export function formatDuration(seconds) {
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return formatUnits(Math.floor(s / 60), "min", s % 60, "s", s < 600);
  if (s < 86400) return formatUnits(Math.floor(s / 3600), "h", Math.floor((s % 3600) / 60), "min", true);
  return formatUnits(Math.floor(s / 86400), "d", Math.floor((s % 86400) / 3600), "h", true);
}

function formatUnits(large, largeUnit, small, smallUnit, showSmall) {
  return showSmall && small ? `${large} ${largeUnit} ${small} ${smallUnit}` : `${large} ${largeUnit}`;
}

export function formatCount(number) {
  return number < 100_000 ? wholeNumber.format(number) : compactNumber.format(number);
}

// All digits of a stream ID (a Number or a BigInt), in groups of three.
export function formatId(id) {
  return wholeNumber.format(id);
}

export function formatRate(perSecond) {
  if (perSecond === 0) return "0";
  return perSecond < 9.95 ? perSecond.toFixed(1) : formatCount(perSecond);
}

// A count with its noun, such as "1 gap" or "2 gaps".
export function pluralize(number, singular, plural = `${singular}s`) {
  return `${formatCount(number)} ${number === 1 ? singular : plural}`;
}

// The time of day of `moment`: milliseconds since 1970, or an ISO 8601 text.
export function formatTime(moment) {
  return new Date(moment).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
}
