// Numbers as people read them. What the server does not say is a dash.

export function count(value) {
  return typeof value === 'number' ? value.toLocaleString('en') : '–';
}

export function bytes(value) {
  if (typeof value !== 'number') return '–';
  const units = ['B', 'kB', 'MB', 'GB', 'TB'];
  const unit = Math.min(Math.floor(Math.log10(Math.max(value, 1)) / 3), units.length - 1);
  return `${(value / 1000 ** unit).toLocaleString('en', { maximumFractionDigits: 1 })} ${units[unit]}`;
}

/** A time in seconds, as short as it reads well. */
export function latency(seconds) {
  if (typeof seconds !== 'number') return '–';
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  const ms = seconds * 1000;
  return `${ms.toFixed(ms < 10 ? 2 : 1)} ms`;
}

export function rate(tokensPerS) {
  if (typeof tokensPerS !== 'number') return '–';
  return `${tokensPerS.toLocaleString('en', { maximumFractionDigits: tokensPerS < 100 ? 1 : 0 })} tokens/s`;
}
