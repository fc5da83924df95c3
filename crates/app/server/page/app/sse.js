// Server-sent events from a response body, however the network cuts it: the data of each event, as text, and its number, if it
// has one.

/** Data of one event; more than this is not an answer but a fault. */
const EVENT_CHARS_MAX = 4 << 20;

/** `{ data, number }` of each event; `number` is null without an `id`. */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  let data = [];
  let number = null;
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      // A lone CR at the end may be half of a CRLF: it waits for what follows.
      const lines = rest.split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line === '') {
          if (data.length) yield { data: data.join('\n'), number };
          data = [];
          number = null;
        } else if (line.startsWith('data:')) {
          data.push(line.slice(line[5] === ' ' ? 6 : 5));
        } else if (/^id: ?\d+$/.test(line)) {
          number = Number(line.slice(3));
        }
      }
      if (rest.length > EVENT_CHARS_MAX) throw new Error('the server sent an event that is too long');
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
