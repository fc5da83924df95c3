// From the chunks of a streamed answer to the message that they make. No elements here.
import { ApiError, streamChat } from './api.js';

/** Writes the answer to `body` into `message`, calling `onChange` after every chunk. Never throws: see `message.error`. */
export async function writeAnswer(message, body, signal, onChange) {
  const began = performance.now();
  try {
    for await (const chunk of streamChat(body, signal)) {
      addChunk(message, chunk);
      if (message.content || message.reasoning || message.toolCalls) message.firstMs ??= performance.now() - began;
      onChange();
    }
  } catch (error) {
    if (signal.aborted) message.finish = 'stopped';
    else message.error = { text: error.message, status: error.status ?? 0, retryAfterS: error.retryAfterS ?? null };
    if (!signal.aborted && !(error instanceof ApiError)) console.error(error);
  }
  message.totalMs = performance.now() - began;
}

function addChunk(message, { choices = [], usage }) {
  if (usage) message.usage = { prompt: usage.prompt_tokens, cached: usage.prompt_tokens_details?.cached_tokens ?? 0, generated: usage.completion_tokens };
  const [choice] = choices;
  if (!choice) return;
  const { content, reasoning_content: reasoning, tool_calls: calls = [] } = choice.delta ?? {};
  if (reasoning) message.reasoning = (message.reasoning ?? '') + reasoning;
  if (content) message.content += content;
  for (const call of calls ?? []) addToolCall(message, call);
  if (choice.finish_reason) message.finish = choice.finish_reason;
}

function addToolCall(message, { index = 0, id, function: part = {} }) {
  message.toolCalls ??= [];
  const call = (message.toolCalls[index] ??= { id: '', name: '', arguments: '' });
  if (id) call.id = id;
  if (part.name) call.name += part.name;
  if (part.arguments) call.arguments += part.arguments;
}
