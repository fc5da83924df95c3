// The machines, or peers of a swarm, that were found and that the chain does not have, each with the reason.
import { addressOf, layersOf, recordOf } from './chain.js';
import { h, setText } from './dom.js';
import { bytes, count, latency } from './units.js';

export class Nodes {
  #list = h('ul', { class: 'nodes' });
  #title = h('h2', { id: 'nodes-title' });
  element = h('section', { class: 'card', id: 'nodes', 'aria-labelledby': 'nodes-title', hidden: true }, this.#title, this.#list);

  /** `swarm`: what the server says of it, if the nodes are peers. */
  show(nodes, swarm) {
    setText(this.#title, swarm ? 'Peers that are not used' : 'Machines that are not used');
    const unused = nodes.filter(({ state }) => state !== 'used');
    this.element.hidden = unused.length === 0;
    while (this.#list.childElementCount > unused.length) this.#list.lastElementChild.remove();
    while (this.#list.childElementCount < unused.length) this.#list.append(emptyItem());
    unused.forEach((node, index) => {
      const [name, address, state, why, facts] = this.#list.children[index].children;
      setText(name, node.name ?? 'a machine');
      name.title = node.peer?.id ?? '';
      setText(address, addressOf(node));
      address.title = node.address ?? '';
      state.classList.toggle('failed', ['failed', 'lost'].includes(node.state));
      setText(state, stateOf(node));
      setText(why, node.reason ?? '');
      setText(facts, node.peer ? peerFactsOf(node) : factsOf(node));
    });
  }
}

function stateOf({ state, peer }) {
  if (peer?.avoided) return 'avoided';
  const service = peer?.block?.state;
  return service && service !== 'serving' ? service : state;
}

function emptyItem() {
  return h('li', {}, h('strong', {}), h('span', { class: 'mono' }), h('span', { class: 'tag' }), h('span', { class: 'why' }), h('span', { class: 'hint' }));
}

function factsOf({ level, threads, memory_bytes: memory, round_trip_s: roundTrip }) {
  const parts = [level, threads ? `${threads} threads` : null, memory ? bytes(memory) : null, roundTrip ? `RTT ${latency(roundTrip)}` : null];
  return parts.filter(Boolean).join(', ');
}

function peerFactsOf({ peer, round_trip_s: roundTrip }) {
  const { block, reach } = peer;
  const parts = [block ? layersOf(block) : null, reach === 'relayed' ? 'relayed' : null,
    block ? `${count(block.tokens_free)} tokens free` : null, block ? `${latency(block.layer_s)} a layer` : null,
    typeof roundTrip === 'number' ? `RTT ${latency(roundTrip)}` : null, recordOf(peer)];
  return parts.filter(Boolean).join(', ');
}
