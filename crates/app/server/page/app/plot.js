// A small plot of one rate over the last two minutes. Drawn from scratch each second: 120 points cost nothing.
import { h, s, setText } from './dom.js';

const POINTS_MAX = 120;
const WIDTH = 480;
const HEIGHT = 96;

export class Plot {
  #values = [];
  #label;
  #now = h('strong', {}, '0');
  #most = h('span', { class: 'most' });
  #area = s('path', { class: 'area' });
  #line = s('path', { class: 'line' });
  #svg = s('svg', { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: 'none', role: 'img' }, this.#area, this.#line);

  constructor(label) {
    this.#label = label;
    this.element = h('figure', { class: 'plot' }, h('figcaption', {}, this.#now, ` ${label}`, this.#most), this.#svg);
  }

  add(value) {
    this.#values.push(value);
    if (this.#values.length > POINTS_MAX) this.#values.shift();
    const top = niceTop(Math.max(...this.#values));
    const step = WIDTH / (POINTS_MAX - 1);
    const left = WIDTH - (this.#values.length - 1) * step;
    const points = this.#values.map((point, i) => `${(left + i * step).toFixed(1)},${(HEIGHT - 1 - (point / top) * (HEIGHT - 6)).toFixed(1)}`);
    this.#line.setAttribute('d', `M${points.join('L')}`);
    this.#area.setAttribute('d', `M${left.toFixed(1)},${HEIGHT}L${points.join('L')}L${WIDTH},${HEIGHT}Z`);
    setText(this.#now, shown(value));
    setText(this.#most, `peak ${shown(Math.max(...this.#values))}`);
    this.#svg.setAttribute('aria-label', `${this.#label}, last two minutes: now ${shown(value)}, peak ${shown(Math.max(...this.#values))}`);
  }
}

/** The next 1, 2 or 5 times a power of ten. */
function niceTop(value) {
  if (value <= 1) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((top) => top >= value);
}

function shown(value) {
  return value.toLocaleString('en', { maximumFractionDigits: value < 10 ? 1 : 0 });
}
