// The machines that were found and have no layers, each with the reason.
import { h, setText } from './dom.js';
import { bytes, latency } from './units.js';

export class Nodes {
  #list = h('ul', { class: 'nodes' });
  element = h('section', { class: 'card', id: 'nodes', 'aria-label': 'Machines that are not used', hidden: true },
    h('h2', {}, 'Machines that are not used'), this.#list);

  show(nodes) {
    const unused = nodes.filter(({ state }) => state !== 'used');
    this.element.hidden = unused.length === 0;
    while (this.#list.childElementCount > unused.length) this.#list.lastElementChild.remove();
    while (this.#list.childElementCount < unused.length) this.#list.append(emptyItem());
    unused.forEach((node, index) => {
      const [name, address, state, why, facts] = this.#list.children[index].children;
      setText(name, node.name ?? 'a machine');
      setText(address, node.address);
      state.classList.toggle('failed', node.state === 'failed');
      setText(state, node.state);
      setText(why, node.reason ?? '');
      setText(facts, factsOf(node));
    });
  }
}

function emptyItem() {
  return h('li', {}, h('strong', {}), h('span', { class: 'mono' }), h('span', { class: 'tag' }), h('span', { class: 'why' }), h('span', { class: 'hint' }));
}

function factsOf({ level, threads, memory_bytes: memory, round_trip_s: roundTrip }) {
  const parts = [level, threads ? `${threads} threads` : null, memory ? bytes(memory) : null, roundTrip ? `RTT ${latency(roundTrip)}` : null];
  return parts.filter(Boolean).join(', ');
}
