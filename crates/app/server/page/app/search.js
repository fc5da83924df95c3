// Finds words in conversations: in the title, in messages of every branch, and in files.
import { contentOf } from './conversation.js';

/** Characters shown before and after what was found. */
const AROUND = 32;

/** Where all words of `query` are found: null if one is missing, otherwise the text around the first that is not in the title. */
export function findIn(conversation, query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const texts = conversation.messages.map(contentOf);
  const title = conversation.title.toLowerCase();
  const all = [title, ...texts.map((text) => text.toLowerCase())];
  if (!words.every((word) => all.some((text) => text.includes(word)))) return null;
  const word = words.find((candidate) => !title.includes(candidate));
  if (word === undefined) return '';
  const text = texts.find((candidate) => candidate.toLowerCase().includes(word));
  return around(text, text.toLowerCase().indexOf(word), word.length);
}

function around(text, at, length) {
  const from = Math.max(at - AROUND, 0);
  const to = Math.min(at + length + AROUND, text.length);
  const part = text.slice(from, to).replace(/\s+/g, ' ').trim();
  return `${from > 0 ? '…' : ''}${part}${to < text.length ? '…' : ''}`;
}
