//! An answer, told as a message.

use super::compose::Composer;
use super::reply::{Event, Message, MessageDelta, MessageKind, ReplyRole, StopReason, Usage};
use super::request::{Display, Request, Thinking};
use crate::answer::{self, Finish, Part};
use crate::error::ApiError;
use crate::identity::fresh;
use crate::narrate::Narrator;
use crate::sse;

/// Sends the events of one message and keeps what it is made of.
pub struct Teller {
    id: String,
    model: String,
    composer: Composer,
    end: Option<(MessageDelta, Usage)>,
}

/// What is said in a stream: an event of the message, or why there are no more of them.
pub enum Said {
    Event(Event),
    Error(ApiError),
}

impl Teller {
    pub fn new(request: &Request) -> Self {
        let omitted = Some(Display::Omitted);
        let hides = match request.thinking {
            Some(Thinking::Enabled { display } | Thinking::Adaptive { display }) => display == omitted,
            _ => false,
        };
        let composer = Composer::new(!hides, || fresh("toolu_"));
        Self { id: fresh("msg_"), model: request.model.clone(), composer, end: None }
    }

    /// The whole message, once its last part was told.
    pub fn into_message(self) -> Result<Message, ApiError> {
        let (end, usage) = self.end.ok_or_else(|| ApiError::internal("the answer stopped before its end"))?;
        Ok(Message {
            id: self.id,
            kind: MessageKind::Message,
            role: ReplyRole::Assistant,
            model: self.model,
            content: self.composer.into_blocks(),
            stop_reason: Some(end.stop_reason),
            stop_sequence: end.stop_sequence,
            usage,
        })
    }

    fn start(&self, usage: Usage) -> Event {
        let message = Message {
            id: self.id.clone(),
            kind: MessageKind::Message,
            role: ReplyRole::Assistant,
            model: self.model.clone(),
            content: Vec::new(),
            stop_reason: None,
            stop_sequence: None,
            usage,
        };
        Event::MessageStart { message }
    }
}

impl Narrator for Teller {
    type Event = Said;

    /// A message starts with its usage, and what the cache held is known when the prompt has been computed.
    fn begin(&mut self, _: &mut dyn FnMut(Said)) {}

    fn tell(&mut self, part: Part, usage: answer::Usage, say: &mut dyn FnMut(Said)) {
        let mut say = |event| say(Said::Event(event));
        match part {
            Part::Prefilled { .. } => {
                say(self.start(usage.into()));
                say(Event::Ping);
            }
            Part::Said { deltas, .. } => {
                for delta in deltas {
                    self.composer.push(delta, &mut say);
                }
            }
            Part::Ended(finish) => {
                self.composer.finish(&mut say);
                let delta = MessageDelta::from(finish);
                let usage = usage.into();
                self.end = Some((delta.clone(), usage));
                say(Event::MessageDelta { delta, usage });
                say(Event::MessageStop);
            }
        }
    }

    fn fail(&mut self, error: ApiError, say: &mut dyn FnMut(Said)) {
        say(Said::Error(error));
    }

    fn write(said: &Said) -> sse::Event {
        match said {
            Said::Event(event) => sse::Event::named(event.name(), event),
            Said::Error(error) => sse::Event::named("error", &error.anthropic()),
        }
    }
}

impl From<Finish> for MessageDelta {
    fn from(finish: Finish) -> Self {
        let (stop_reason, stop_sequence) = match finish {
            Finish::Stop => (StopReason::EndTurn, None),
            Finish::StopString(text) => (StopReason::StopSequence, Some(text)),
            Finish::Length => (StopReason::MaxTokens, None),
            Finish::ToolCalls => (StopReason::ToolUse, None),
        };
        Self { stop_reason, stop_sequence }
    }
}

impl From<answer::Usage> for Usage {
    fn from(usage: answer::Usage) -> Self {
        Self {
            input_tokens: usage.prompt_tokens.saturating_sub(usage.cached_tokens),
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: usage.cached_tokens,
            output_tokens: usage.completion_tokens,
        }
    }
}
