// The processes that share the model, one row for each. Shown only where there are several.
import { h, setText } from './dom.js';
import { bytes, count } from './units.js';

const COLUMNS = [
  { title: 'Rank', text: ({ rank }) => String(rank) },
  { title: 'State', text: ({ state }) => state },
  { title: 'Process', text: ({ pid }) => (pid ? String(pid) : '–') },
  { title: 'Weights', text: ({ weight_bytes: weights }) => bytes(weights) },
  { title: 'Resident', text: ({ resident_bytes: resident }) => bytes(resident) },
  { title: 'In collectives', text: ({ wait_s: wait, step_s: step }) => (step > 0 ? `${((wait / step) * 100).toFixed(1)} %` : '–') },
  { title: 'Restarts', text: ({ restarts }) => count(restarts) },
];

export class Ranks {
  #rows = h('tbody', {});

  // Narrow screens scroll it sideways, by keys too.
  element = h('section', { class: 'card', id: 'ranks', 'aria-label': 'Ranks', hidden: true },
    h('h2', {}, 'Ranks'),
    h('div', { class: 'ranks', tabindex: '0', role: 'region', 'aria-labelledby': 'ranks-caption' },
      h('table', {},
        h('caption', { class: 'unseen', id: 'ranks-caption' }, 'The processes that share the model'),
        h('thead', {}, h('tr', {}, ...COLUMNS.map(({ title }) => h('th', { scope: 'col' }, title)))),
        this.#rows)));

  show(ranks) {
    this.element.hidden = ranks.length < 2;
    while (this.#rows.rows.length > ranks.length) this.#rows.lastElementChild.remove();
    while (this.#rows.rows.length < ranks.length) this.#rows.append(emptyRow());
    ranks.forEach((rank, index) => {
      const row = this.#rows.rows[index];
      row.classList.toggle('away', !rank.ready);
      COLUMNS.forEach(({ text }, column) => setText(row.cells[column], text(rank)));
    });
  }
}

function emptyRow() {
  return h('tr', {}, h('th', { scope: 'row' }), ...COLUMNS.slice(1).map(() => h('td', {})));
}
