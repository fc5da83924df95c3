// What happened in the cluster, the latest first.
import { layersOf, nameOf } from './chain.js';
import { h, setText } from './dom.js';

const SHOWN_MAX = 20;

export class Timeline {
  #list = h('ol', { class: 'events' });
  element = h('section', { class: 'card', id: 'events', 'aria-label': 'Events', hidden: true }, h('h2', {}, 'Events'), this.#list);

  show(events) {
    const shown = events.slice(-SHOWN_MAX).reverse();
    this.element.hidden = shown.length === 0;
    while (this.#list.childElementCount > shown.length) this.#list.lastElementChild.remove();
    while (this.#list.childElementCount < shown.length) this.#list.append(h('li', {}, h('time', {}), h('span', {})));
    shown.forEach((event, index) => {
      const item = this.#list.children[index];
      const [time, words] = item.children;
      const date = new Date(event.at * 1000);
      setText(time, date.toLocaleTimeString());
      time.dateTime = date.toISOString();
      setText(words, wordsOf(event));
      item.className = event.kind;
    });
  }
}

export function wordsOf({ kind, machine, layers, to = [], seconds, reason }) {
  const name = machine ?? 'a machine';
  const because = reason ? `: ${reason}` : '';
  const others = to.map((other) => (other === 'this machine' ? nameOf({ coordinator: true }) : other)).join(', ');
  const within = typeof seconds === 'number' ? ` in ${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s` : '';
  switch (kind) {
    case 'joined':
      return `${name} joined`;
    case 'returned':
      return `${name} is back`;
    case 'left':
      return `${name} left${because}`;
    case 'lost':
      return `${name} was lost, with ${layersOf({ layers })}${because}`;
    case 'moved':
      return `${name} lost, its ${layersOf({ layers })} moved to ${others || 'nobody'}${within}`;
    case 'formed':
      return `The chain was formed: ${others}`;
    default:
      return `The chain was formed again${within}${because}`;
  }
}
