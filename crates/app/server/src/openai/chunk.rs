//! Stream chunks: the parts that chat completions and completions share.

use serde::Serialize;

use super::common_fields::StreamOptions;
use super::usage::UsageBody;
use crate::generation::Usage;
use crate::ids;
use crate::stream::StreamEvent;

/// Writes the chunks of one stream, with their common fields.
pub struct ChunkWriter {
    pub id: String,
    pub model: String,
    object: &'static str,
    created: u64,
    include_usage: bool,
    continuous_usage: bool,
    /// The tokens so far, of all choices.
    pub usage: Usage,
}

#[derive(Serialize)]
struct Chunk<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [C],
    /// Absent unless usage was requested; then null in all chunks but the last, unless it was requested for every chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<UsageBody>>,
}

impl ChunkWriter {
    /// For a new generation. `prefix` is the prefix of its id.
    pub fn new(prefix: &str, object: &'static str, model: &str, options: StreamOptions) -> Self {
        let (id, created) = (ids::new_id(prefix), ids::unix_now());
        let include_usage = options.include_usage.unwrap_or(false);
        let continuous_usage = include_usage && options.continuous_usage_stats.unwrap_or(false);
        Self { id, model: model.to_owned(), object, created, include_usage, continuous_usage, usage: Usage::default() }
    }

    /// A chunk of one choice.
    pub fn choice(&self, choice: impl Serialize) -> StreamEvent {
        self.chunk(&[choice], self.continuous_usage.then(|| self.usage.into()))
    }

    /// Ends a stream: with a usage chunk, if usage was requested, and `[DONE]`.
    pub fn end(&self, usage: Usage, out: &mut Vec<StreamEvent>) {
        if self.include_usage {
            out.push(self.chunk::<()>(&[], Some(usage.into())));
        }
        out.push(StreamEvent::literal("[DONE]"));
    }

    fn chunk<C: Serialize>(&self, choices: &[C], usage: Option<UsageBody>) -> StreamEvent {
        StreamEvent::json(&Chunk {
            id: &self.id,
            object: self.object,
            created: self.created,
            model: &self.model,
            choices,
            usage: self.include_usage.then_some(usage),
        })
    }
}
