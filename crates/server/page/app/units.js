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
