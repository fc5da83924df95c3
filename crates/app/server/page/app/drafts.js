// What is written and not sent, for each conversation. A new conversation's is kept under an empty name.
import { recall, remember } from './memory.js';

const DRAFTS_MAX = 50;
const CHARS_MAX = 100_000;

export function draftOf(id) {
  const [, text = ''] = all().find(([other]) => other === id) ?? [];
  return text;
}

/** Keeps a draft; an empty one is forgotten. The oldest give way. */
export function keepDraft(id, text) {
  if (draftOf(id) === text) return;
  const others = all().filter(([other]) => other !== id);
  remember('drafts', text.trim() ? [...others, [id, text.slice(0, CHARS_MAX)]].slice(-DRAFTS_MAX) : others);
}

function all() {
  const kept = recall('drafts', []);
  return Array.isArray(kept) ? kept.filter((entry) => Array.isArray(entry) && entry.every((part) => typeof part === 'string')) : [];
}
