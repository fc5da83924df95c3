// The picture of a chain: one box for each stage, arrows with the time of each hop, and a bar that shows who has which layers.
// Stages are machines, or peers of a swarm, which tell less of themselves: what was measured of them takes its place. Names come from other machines. They are text, as everything here.
import { h, s, setText } from './dom.js';
import { identityOf, toneOf } from './tones.js';
import { bytes, count, latency } from './units.js';

export class Chain {
  #bar = h('div', { class: 'layers', role: 'img', hidden: true });
  #list = h('ol', { class: 'chain', 'aria-label': 'Stages, in the order of the layers' });
  #stages = []; // one for each item of the list
  element = h('section', { class: 'card', id: 'chain', 'aria-label': 'Layers', hidden: true }, h('h2', {}, 'Layers'), this.#bar, this.#list);

  show(stages) {
    this.element.hidden = stages.length === 0;
    while (this.#stages.length > stages.length) this.#stages.pop().element.remove();
    while (this.#stages.length < stages.length) this.#add();
    stages.forEach((stage, index) => {
      const next = stages[(index + 1) % stages.length];
      this.#stages[index].show(stage, next);
    });
    this.#showBar(stages);
  }

  /** What is on show is not what runs now. */
  setStale(stale) {
    this.element.classList.toggle('stale', stale);
  }

  #add() {
    const stage = new Stage();
    this.#stages.push(stage);
    this.#list.append(stage.element);
  }

  #showBar(stages) {
    const withLayers = stages.filter(({ layers }) => layers);
    this.#bar.hidden = withLayers.length < 2;
    while (this.#bar.childElementCount > stages.length) this.#bar.lastElementChild.remove();
    while (this.#bar.childElementCount < stages.length) this.#bar.append(h('i', {}));
    stages.forEach((stage, index) => {
      const part = this.#bar.children[index];
      part.style.flexGrow = String(layerCount(stage));
      part.className = `${toneOf(identityOf(stage))}${isGone(stage) ? ' gone' : ''}`;
    });
    const label = withLayers.map((stage) => `${nameOf(stage)} ${isGone(stage) ? 'had' : 'has'} ${layersOf(stage)}`).join('; ');
    if (this.#bar.getAttribute('aria-label') !== label) this.#bar.setAttribute('aria-label', label);
  }
}

class Stage {
  #name = h('strong', {});
  #tone = h('i', { 'aria-hidden': 'true' });
  #state = h('span', { class: 'tag', hidden: true });
  #address = h('span', { class: 'mono' });
  #layers = h('span', {});
  #compute = h('span', {});
  #queue = h('span', {});
  #cpu = h('span', {});
  #memory = h('span', {});
  #record = h('span', { class: 'record' });
  #used = h('i', { class: 'used' });
  #meter = h('div', { class: 'meter', 'aria-hidden': 'true' }, this.#used);
  #to = h('span', { class: 'unseen' });
  #time = h('span', { class: 'time' });
  #way = h('span', { class: 'way' });
  #hop = h('div', { class: 'hop' }, arrow(), this.#to, this.#time, this.#way);

  constructor() {
    this.element = h('li', {},
      h('div', { class: 'stage-box' },
        h('p', { class: 'stage-name' }, this.#tone, this.#name, this.#state),
        this.#address, this.#layers, this.#compute, this.#queue, this.#cpu, this.#memory, this.#record, this.#meter),
      this.#hop);
  }

  /** `next`: where the activations go. */
  show(stage, next) {
    const { memory, hop, peer, state = 'running' } = stage;
    const runs = state === 'running';
    this.#tone.className = toneOf(identityOf(stage));
    this.#state.hidden = runs;
    this.#state.classList.toggle('failed', isGone(stage));
    setText(this.#state, runs ? '' : state);
    this.element.classList.toggle('lost', isGone(stage));
    setText(this.#name, nameOf(stage));
    this.#name.title = peer?.id ?? nameOf(stage);
    setText(this.#address, stage.coordinator ? 'embedding, head' : addressOf(stage));
    this.#address.title = stage.address ?? '';
    this.#address.classList.toggle('mono', Boolean(stage.address));
    setText(this.#layers, layersOf(stage));
    setText(this.#compute, `${latency(stage.compute_s)} per step`);
    // The server measures its own part only where it has layers, or memory for them.
    this.#compute.hidden = !runs || typeof stage.compute_s !== 'number' && (!hop || (!peer && !memory));
    setText(this.#queue, peer ? `${latency(peer.queue_s)} queued` : '');
    this.#queue.hidden = !peer;
    setText(this.#cpu, peer ? `${wayTo(peer)}, RTT ${latency(peer.round_trip_s)}` : cpuOf(stage));
    const free = memory?.free_bytes;
    const all = typeof free === 'number' ? memory.used_bytes + free : null;
    if (peer) setText(this.#memory, `${bytes(peer.sent_bytes)} out, ${bytes(peer.returned_bytes)} in`);
    else setText(this.#memory, all === null ? `${bytes(memory?.used_bytes)} of memory` : `${bytes(memory.used_bytes)} of ${bytes(all)}`);
    this.#memory.hidden = isGone(stage) || (!peer && !memory);
    setText(this.#record, peer ? recordOf(peer) : '');
    this.#record.hidden = !this.#record.textContent;
    this.#record.classList.toggle('wrong', Boolean(peer?.failures || peer?.differences));
    this.#meter.hidden = all === null || isGone(stage);
    this.#used.style.width = `${all ? Math.min(100, (memory.used_bytes / all) * 100) : 0}%`;
    this.#hop.hidden = !hop;
    this.#hop.classList.toggle('back', Boolean(next?.coordinator));
    setText(this.#to, `then to ${next ? nameOf(next) : 'the next stage'}, `);
    setText(this.#time, latency(runs ? hop?.seconds : null));
    setText(this.#way, wayOf(hop, next));
  }
}

/** What a machine had that is gone is nowhere now. */
function isGone({ state }) {
  return state === 'lost';
}

export function nameOf({ coordinator, name }) {
  return coordinator ? 'Server' : name || 'a machine';
}

function wayOf(hop, next) {
  if (next?.coordinator) return 'back to the server';
  return hop?.way === 'coordinator' ? 'through the server' : `RTT ${latency(hop?.round_trip_s)}`;
}

function wayTo({ reach }) {
  return reach === 'unknown' ? 'not connected' : reach;
}

/** A multiaddress is shortened to a host and a port; of one through a relay, to the relay's. */
export function addressOf({ address }) {
  if (!address) return 'not connected';
  const [, , host, protocol, port] = address.split('/');
  if (!port) return address;
  const place = `${host.includes(':') ? `[${host}]` : host}:${port}`;
  if (address.endsWith('/p2p-circuit')) return `via ${place}`;
  return protocol === 'udp' ? `${place} QUIC` : place;
}

/** What a peer did that it should not, and how often it was checked. */
export function recordOf({ failures, checks, differences }) {
  const parts = [failures ? `${count(failures)} failure${failures === 1 ? '' : 's'}` : null,
    checks ? `${count(checks)} check${checks === 1 ? '' : 's'}${differences ? `, ${count(differences)} wrong` : ''}` : null];
  return parts.filter(Boolean).join(', ');
}

function layerCount({ layers }) {
  return layers ? layers.end - layers.start : 0;
}

/** Counted from 0, as the API does. */
export function layersOf({ layers }) {
  if (!layers) return 'no layers';
  return layers.end - layers.start === 1 ? `layer ${layers.start}` : `layers ${layers.start}–${layers.end - 1}`;
}

function cpuOf({ level, threads, ranks }) {
  const parts = [level, threads ? `${threads} thread${threads === 1 ? '' : 's'}` : null, ranks > 1 ? `${ranks} ranks` : null];
  return parts.filter(Boolean).join(', ') || '–';
}

function arrow() {
  return s('svg', { viewBox: '0 0 48 12', class: 'arrow', 'aria-hidden': 'true' }, s('path', { d: 'M1 6h45M40 1l6 5-6 5' }));
}
