//! A stream of chunks: what chat completions and completions share.

use serde::Serialize;

use super::usage::UsageBody;
use crate::answer::Usage;
use crate::identity;
use crate::sse::Event;

/// What all chunks of one answer have in common.
pub struct Chunks {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    include_usage: bool,
}

#[derive(Serialize)]
struct Chunk<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [C],
    /// Absent unless usage was asked for; then null but in the last chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<UsageBody>>,
}

impl Chunks {
    /// Of a new answer, whose id begins with `prefix`.
    pub fn new(prefix: &str, object: &'static str, model: &str, include_usage: bool) -> Self {
        let (id, created) = (identity::fresh(prefix), identity::unix_now());
        Self { id, object, created, model: model.to_owned(), include_usage }
    }

    /// A chunk with a part of one choice.
    pub fn choice(&self, choice: impl Serialize) -> Event {
        self.event(&[choice], None)
    }

    /// How a stream ends: with its usage, if that was asked for.
    pub fn end(&self, usage: Usage) -> Vec<Event> {
        let usage = self.include_usage.then(|| self.event::<()>(&[], Some(usage.into())));
        usage.into_iter().chain([Event::done()]).collect()
    }

    fn event<C: Serialize>(&self, choices: &[C], usage: Option<UsageBody>) -> Event {
        Event::data(&Chunk {
            id: &self.id,
            object: self.object,
            created: self.created,
            model: &self.model,
            choices,
            usage: self.include_usage.then_some(usage),
        })
    }
}
