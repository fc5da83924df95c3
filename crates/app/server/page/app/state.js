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

function stateOf(server) {
  const { error, status } = server;
  if (error?.status === 401) return { kind: 'failed', words: apiKey() ? 'API key refused' : 'API key needed' };
  if (error) return { kind: 'failed', words: error.message };
  if (!status) return { kind: 'loading', words: 'connecting' };
  // Beside the list of models it is not said again.
  const name = server.models.length > 1 ? '' : shortName(status.model ?? '');
  switch (status.state) {
    case 'ready':
      return { kind: 'ready', words: name || 'ready' };
    case 'loading':
      return { kind: 'loading', words: words('loading', name, percent(status.progress)) };
    case 'rebuilding':
      return { kind: 'loading', words: words('rebuilding', name), why: status.reason ?? undefined };
    case 'unloaded':
      return { kind: 'idle', words: words(name, 'not loaded'), why: 'It is loaded when it is asked' };
    default:
      return { kind: 'failed', words: status.reason ?? words(name, status.state) };
  }
}

function words(...parts) {
  return parts.map((part) => part.trim()).filter(Boolean).join(' ');
}

/** A hub name or a path, without what comes before its last part. */
export function shortName(name) {
  return name.split('/').at(-1);
}

/** How far loading is, as words to put behind others. */
export function percent(progress) {
  return progress?.total ? ` ${Math.floor(progress.fraction * 100)} %` : '';
}
