// The line in the header that says what model answers, or why none does yet.
import { announce } from './announcer.js';
import { apiKey } from './api.js';
import { byId, setText } from './dom.js';

export function showState(server) {
  const { kind, words, why = words } = stateOf(server);
  const element = byId('state');
  // Progress changes every second: only arriving somewhere else is worth saying aloud.
  if (element.dataset.kind !== kind) announce(words);
  element.dataset.kind = kind;
  element.title = why;
  setText(element.querySelector('.words'), words);
}

function stateOf({ error, status }) {
  if (error?.status === 401) return { kind: 'failed', words: apiKey() ? 'API key refused' : 'API key needed' };
  if (error) return { kind: 'failed', words: error.message };
  if (!status) return { kind: 'loading', words: 'connecting' };
  const name = shortName(status.model ?? '');
  switch (status.state) {
    case 'ready':
      return { kind: 'ready', words: name || 'ready' };
    case 'loading':
      return { kind: 'loading', words: `loading ${name}${percent(status.progress)}` };
    case 'rebuilding':
      return { kind: 'loading', words: `rebuilding ${name}`, why: status.reason ?? undefined };
    default:
      return { kind: 'failed', words: status.reason ?? `${name} ${status.state}` };
  }
}

/** A hub name or a path, without what comes before its last part. */
export function shortName(name) {
  return name.split('/').at(-1);
}

/** How far loading is, as words to put behind others. */
export function percent(progress) {
  return progress?.total ? ` ${Math.floor(progress.fraction * 100)} %` : '';
}
