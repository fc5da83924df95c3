// The server's HTTP API as this page uses it. Every failure becomes an ApiError that can be shown as it is.
import { recall, remember } from './memory.js';
import { eventData } from './sse.js';

export class ApiError extends Error {
  constructor(message, { status = 0, retryAfterS = null } = {}) {
    super(message);
    this.status = status;
    this.retryAfterS = retryAfterS;
  }
}

export const apiKey = () => recall('key', '');
export const setApiKey = (key) => remember('key', key);

/** GET /v1/models: the names that a request may ask for. */
export async function modelNames() {
  const { data = [] } = await (await call('v1/models')).json();
  return data.map((model) => model.id);
}

/** GET /status. */
export async function serverStatus(signal) {
  return (await call('status', { signal })).json();
}

/** POST /v1/chat/completions: the chunks of a streamed answer. Ends only after the server said that it ended. */
export async function* streamChat(body, signal) {
  const response = await call('v1/chat/completions', {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  try {
    for await (const data of eventData(response.body)) {
      if (data === '[DONE]') return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message ?? 'the server failed', { status: Number(chunk.error.code) || 0 });
      yield chunk;
    }
  } catch (error) {
    throw signal.aborted || error instanceof ApiError ? error : new ApiError(`the answer broke off: ${error.message}`);
  }
  throw new ApiError('the connection closed before the answer ended');
}

async function call(path, options = {}) {
  const key = apiKey();
  const headers = { ...options.headers, ...(key && { authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: 'no-store' });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ApiError('the server cannot be reached');
  }
  if (!response.ok) throw await failure(response);
  return response;
}

async function failure(response) {
  const retryAfter = Number.parseInt(response.headers.get('retry-after'), 10);
  const details = { status: response.status, retryAfterS: Number.isFinite(retryAfter) ? retryAfter : null };
  try {
    const { error } = await response.json();
    if (error?.message) return new ApiError(error.message, details);
  } catch {
    // Not our envelope: a proxy in between, most likely.
  }
  return new ApiError(`the server answered ${response.status} ${response.statusText}`.trim(), details);
}
