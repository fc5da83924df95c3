// The cluster tab: what GET /v1/cluster says, asked for twice a second while the tab is on show: a machine that is lost is shown
// as lost within a second.
import { clusterState } from './api.js';
import { Chain, layersOf, nameOf } from './chain.js';
import { byId, h, setText } from './dom.js';
import { Invitation } from './invitation.js';
import { Nodes } from './nodes.js';
import { Plot } from './plot.js';
import { Timeline } from './timeline.js';
import { count, latency, rate } from './units.js';
import { sentence } from './words.js';

const POLL_MS = 500;
/** One point of the plot for so many answers: it has one for each second. */
const ANSWERS_PER_POINT = 2;

const BITS = {
  same: 'the same on all machines',
  same_while_used: 'the same on the machines in use',
  unlike: 'differ: unlike CPUs',
};

export class ClusterView {
  #fields = new Map(); // name -> element
  #problem = h('p', { class: 'problem', role: 'alert', hidden: true });
  #summary = h('p', { class: 'hint', id: 'cluster-summary' }, 'Asking the server.');
  #chain = new Chain();
  #nodes = new Nodes();
  #timeline = new Timeline();
  #invitation = new Invitation();
  #answers = 0;
  #speed = new Plot('tokens/s');
  #chainFacts = h('section', { class: 'card', 'aria-label': 'Chain', hidden: true }, h('h2', {}, 'Chain'),
    this.#row('state', 'State'), this.#row('chains', 'Chains formed'), this.#row('bits', 'Bits'), this.#row('steps', 'Steps'),
    this.#row('step', 'One step'), this.#row('between', 'Between stages'));
  #swarmFacts = h('section', { class: 'card', 'aria-label': 'Swarm', hidden: true }, h('h2', {}, 'Swarm'),
    this.#row('peers', 'Peers known'), this.#row('reach', 'This server is reached'), this.#row('sessions', 'Sessions'),
    this.#row('replaced', 'Parts replaced'), this.#row('checks', 'Spot checks'));
  #model;
  #watched = false;
  #timer = 0;
  #asking = null;

  /** `model()`: the name of the model of which it tells, or null. */
  constructor(model) {
    this.#model = model;
    byId('cluster').append(h('div', { class: 'board' },
      h('h1', { id: 'cluster-title' }, 'Cluster'),
      this.#problem,
      this.#summary,
      this.#chain.element,
      h('div', { class: 'cards' },
        h('section', { class: 'card', 'aria-label': 'Speed' }, h('h2', {}, 'Speed'), this.#speed.element,
          this.#row('answer', 'One answer'), this.#row('predicted', 'Predicted for one'), this.#row('batch', 'Predicted together')),
        this.#chainFacts,
        this.#swarmFacts),
      this.#timeline.element,
      this.#nodes.element,
      this.#invitation.element));
    document.addEventListener('visibilitychange', () => {
      if (!document.hidden && this.#watched) this.#refresh();
    });
  }

  /** Asks again and again while watched. */
  watch(watched) {
    this.#watched = watched;
    clearTimeout(this.#timer);
    if (watched) this.#refresh();
  }

  #refresh() {
    clearTimeout(this.#timer);
    this.#asking ??= this.#ask().finally(() => {
      this.#asking = null;
      if (this.#watched && !document.hidden) this.#timer = setTimeout(() => this.#refresh(), POLL_MS);
    });
  }

  async #ask() {
    try {
      const cluster = await clusterState(this.#model());
      this.#show(cluster);
      await this.#invitation.refresh(cluster.kind);
    } catch (error) {
      this.#say(sentence(error.message));
      this.#chain.setStale(true);
    }
  }

  #show(cluster) {
    const { speed = {}, steps = {}, swarm } = cluster;
    this.#say(problemOf(cluster));
    setText(this.#summary, summaryOf(cluster));
    this.#chain.show(cluster.stages ?? []);
    this.#chain.setStale(cluster.state !== 'ready');
    this.#nodes.show(cluster.nodes ?? [], swarm);
    if (this.#answers % ANSWERS_PER_POINT === 0) this.#speed.add(speed.tokens_per_s ?? 0);
    this.#answers += 1;
    this.#timeline.show(cluster.events ?? []);
    const runs = cluster.state === 'ready';
    this.#chainFacts.hidden = cluster.kind !== 'chain' && !swarm;
    this.#swarmFacts.hidden = !swarm;
    for (const name of ['bits', 'batch']) this.#fields.get(name).parentElement.hidden = Boolean(swarm);
    const values = {
      answer: rate(runs ? speed.answer_tokens_per_s : null),
      predicted: rate(runs ? speed.predicted_tokens_per_s : null),
      batch: runs && speed.predicted_batch ? `${rate(speed.predicted_batch_tokens_per_s)} (${speed.predicted_batch} requests)` : '–',
      state: cluster.state ?? '–',
      chains: count(cluster.chains),
      bits: (runs && BITS[cluster.bits]) || '–',
      steps: count(steps.count),
      step: latency(runs ? steps.seconds : null),
      between: latency(runs ? steps.between_s : null),
      ...swarmValues(swarm),
    };
    for (const [name, value] of Object.entries(values)) setText(this.#fields.get(name), value);
  }

  #say(problem) {
    this.#problem.hidden = !problem;
    if (problem) setText(this.#problem, problem);
  }

  #row(name, label) {
    const value = h('dd', { id: `cluster-${name}` }, '–');
    this.#fields.set(name, value);
    return h('dl', {}, h('dt', {}, label), value);
  }
}

const REACHES = { direct: 'directly', relayed: 'over a relay' };

function swarmValues(swarm) {
  if (!swarm) return {};
  const { peers, reach, sessions, replaced, replace_s: replaceS, checks, differences } = swarm;
  return {
    peers: count(peers),
    reach: REACHES[reach] ?? 'not known yet',
    sessions: count(sessions),
    replaced: replaced ? `${count(replaced)}, in ${latency(replaceS)}` : count(replaced),
    checks: differences ? `${count(checks)}, ${count(differences)} differ` : count(checks),
  };
}

function problemOf({ state, waiting, reason, swarm }) {
  if (waiting) return sentence(`waiting for ${swarm ? 'peers' : 'machines'}: ${waiting}`);
  return state === 'ready' || state === 'loading' || !reason ? null : sentence(reason);
}

/** The picture in words. */
function summaryOf({ kind, state, layers, stages = [], ranks = [] }) {
  if (stages.length === 0) {
    if (kind === 'swarm' && state === 'ready') return 'No layers have run yet: the first request forms a chain of peers.';
    return state === 'loading' ? 'No layers run yet: the model is being loaded.' : 'No layers run now.';
  }
  if (state !== 'ready' && kind === 'chain') {
    const lost = stages.filter((stage) => stage.state === 'lost' && stage.layers);
    const gone = lost.map((stage) => `${nameOf(stage)} is lost: ${layersOf(stage)} run nowhere now`).join('; ');
    return `${gone || 'The chain does not run'}. ${state === 'rebuilding' ? 'Another chain is being formed; the other machines wait with their layers.' : ''}`.trim();
  }
  if (kind === 'swarm') {
    const peers = stages.length === 2 ? `one peer runs all ${layers} layers` : `${stages.length - 1} peers run ${layers} layers, one after the other`;
    return `In the chain that was formed last, ${peers}. Every session has a chain of its own.`;
  }
  const all = layers ? `all ${layers} layers` : 'all layers';
  if (kind === 'ranks') return `${ranks.length} processes of the server share ${all}. The status tab lists them.`;
  if (stages.length === 1) {
    return kind === 'chain' ? `The server runs ${all} itself: no other machine makes it faster.`
      : `The server runs ${all} in one process. With --cluster, machines that run “consort join” take a part of them.`;
  }
  return `${stages.length} machines run ${layers ?? 'the'} layers, one after the other.`;
}
