// The status tab: what GET /status says, and tokens per second made from its totals.
import { byId, h, setText } from './dom.js';
import { Plot } from './plot.js';
import { Ranks } from './ranks.js';
import { percent } from './state.js';
import { bytes, count } from './units.js';

export class StatusView {
  #fields = new Map(); // name -> element
  #generated = new Plot('generated tokens/s');
  #prompt = new Plot('prompt tokens/s');
  #problem = h('p', { class: 'problem', role: 'alert', hidden: true });
  #used = h('i', { class: 'used' });
  #cached = h('i', { class: 'cached' });
  #progress = h('progress', { max: '1', 'aria-label': 'Loading', hidden: true });
  #ranks = new Ranks();
  #before = null; // totals and time of the answer before this one

  constructor() {
    byId('status').append(h('div', { class: 'board' },
      h('h1', { id: 'status-title' }, 'Status'),
      this.#problem,
      h('div', { class: 'cards' },
        card('Model', this.#row('model', 'Name'), this.#row('state', 'State'), this.#progress, this.#row('doing', 'Doing'),
          this.#row('context', 'Context'), this.#row('memory', 'Memory'), this.#row('reserved', 'Reserved'), this.#row('uptime', 'Uptime')),
        card('Requests', this.#row('running', 'Running'), this.#row('waiting', 'Waiting'), this.#row('finished', 'Finished')),
        card('Tokens', this.#row('prompt_total', 'Prompt tokens'), this.#row('generated_total', 'Generated tokens'))),
      card('KV cache', h('div', { class: 'meter', 'aria-hidden': 'true' }, this.#used, this.#cached),
        h('div', { class: 'thirds' }, this.#row('kv_used', 'In use', 'key-used'), this.#row('kv_cached', 'Cached', 'key-cached'), this.#row('kv_total', 'Capacity', 'key-free'))),
      card('Speed', h('div', { class: 'plots' }, this.#generated.element, this.#prompt.element)),
      this.#ranks.element));
  }

  show({ status, error }) {
    const problem = error?.message ?? (status?.state === 'loading' ? null : status?.reason);
    this.#problem.hidden = !problem;
    if (problem) setText(this.#problem, problem);
    if (!status || error) {
      this.#before = null;
      return;
    }
    const { kv = {}, requests = {}, tokens = {} } = status;
    const values = {
      model: status.model ?? '–',
      state: `${status.state}${percent(status.progress)}`,
      doing: status.progress?.doing || '–',
      context: `${count(status.context)} tokens`,
      uptime: duration(status.uptime_s),
      memory: bytes(status.resident_bytes),
      reserved: bytes(status.memory_bytes),
      running: count(requests.running),
      waiting: count(requests.waiting),
      finished: count(requests.finished),
      generated_total: count(tokens.generated_total),
      prompt_total: count(tokens.prompt_total),
      kv_used: `${count(kv.tokens_used)} tokens`,
      kv_cached: `${count(kv.tokens_cached)} tokens`,
      kv_total: `${count(kv.tokens_total)} tokens`,
    };
    for (const [name, value] of Object.entries(values)) setText(this.#fields.get(name), value);
    this.#progress.hidden = status.state !== 'loading';
    this.#fields.get('doing').parentElement.hidden = !status.progress?.doing;
    if (status.progress?.total) this.#progress.value = status.progress.fraction;
    else this.#progress.removeAttribute('value');
    this.#used.style.width = share(kv.tokens_used, kv.tokens_total);
    this.#cached.style.width = share(kv.tokens_cached, kv.tokens_total);
    this.#ranks.show(status.ranks ?? []);
    this.#addSpeed(tokens);
  }

  #addSpeed({ generated_total: generated = 0, prompt_total: prompt = 0 }) {
    const now = { at: performance.now(), generated, prompt };
    const before = this.#before;
    this.#before = now;
    // A smaller total is another server behind the same address.
    if (!before || generated < before.generated || prompt < before.prompt) return;
    const seconds = (now.at - before.at) / 1000;
    this.#generated.add((generated - before.generated) / seconds);
    this.#prompt.add((prompt - before.prompt) / seconds);
  }

  #row(name, label, key = null) {
    const value = h('dd', { id: `status-${name}` }, '–');
    this.#fields.set(name, value);
    return h('dl', { class: key }, h('dt', {}, label), value);
  }
}

function card(title, ...content) {
  return h('section', { class: 'card', 'aria-label': title }, h('h2', {}, title), ...content);
}

function share(part = 0, whole = 0) {
  return `${whole > 0 ? Math.min(100, (part / whole) * 100) : 0}%`;
}

function duration(seconds) {
  if (typeof seconds !== 'number') return '–';
  const [days, hours, minutes] = [Math.floor(seconds / 86400), Math.floor(seconds / 3600) % 24, Math.floor(seconds / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${Math.floor(seconds) % 60} s` : `${Math.floor(seconds)} s`;
}
