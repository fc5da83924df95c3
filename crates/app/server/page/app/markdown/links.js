// Where a link in an answer may lead.

const SCHEMES = new Set(['http:', 'https:', 'mailto:']);

/** The address in normal form, or null when it is not absolute or its scheme could run something. */
export function safeHref(address) {
  try {
    const { protocol, href } = new URL(address);
    return SCHEMES.has(protocol) ? href : null;
  } catch {
    return null;
  }
}
