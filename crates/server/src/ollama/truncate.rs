//! Leaves out the oldest turns of a conversation that is longer than the context, as Ollama does.

use std::sync::Arc;

use text::Message;

use crate::blocking;
use crate::body_budget::BodyPermit;
use crate::error::ApiError;
use crate::generation::{ChatInput, GenerationInput, GenerationRequest, chat_fits};
use crate::served_model::ServedModel;

/// A conversation leaves one part in this many of the context for the output, unless less is asked for.
const OUTPUT_SHARE: usize = 8;

/// The request with as many of the last turns of its conversation as fit, or with the last one if none fits.
pub async fn truncate(
    model: Arc<ServedModel>,
    request: GenerationRequest,
    permit: BodyPermit,
) -> Result<(GenerationRequest, BodyPermit), ApiError> {
    blocking::run(move || {
        let GenerationRequest { input: GenerationInput::Chat(chat), tokens_max, .. } = &request else {
            return Ok((request, permit));
        };
        let output = tokens_max.unwrap_or(usize::MAX).clamp(1, (model.context / OUTPUT_SHARE).max(1));
        let prompt = model.context.saturating_sub(output);
        let messages = longest(&chat.messages, |messages| {
            let chat = ChatInput { messages: messages.to_vec(), ..chat.clone() };
            chat_fits(&model, &chat, prompt)
        })?;
        if messages.len() < chat.messages.len() {
            tracing::info!(left_out = chat.messages.len() - messages.len(), "the conversation is too long");
        }
        let input = GenerationInput::Chat(ChatInput { messages, ..chat.clone() });
        Ok((GenerationRequest { input, ..request }, permit))
    })
    .await
}

/// The whole conversation if it fits; else its system messages and the longest end that starts with a user's message.
fn longest(
    messages: &[Message],
    fits: impl Fn(&[Message]) -> Result<bool, ApiError>,
) -> Result<Vec<Message>, ApiError> {
    if fits(messages)? {
        return Ok(messages.to_vec());
    }
    let starts: Vec<_> = (1..messages.len()).filter(|&index| messages[index].role == "user").collect();
    let Some(&last) = starts.last() else { return Ok(messages.to_vec()) };
    let mut found = from_turn(messages, last);
    let (mut first, mut end) = (0, starts.len() - 1);
    while first < end {
        let middle = first.midpoint(end);
        let candidate = from_turn(messages, starts[middle]);
        if fits(&candidate)? {
            (end, found) = (middle, candidate);
        } else {
            first = middle + 1;
        }
    }
    Ok(found)
}

fn from_turn(messages: &[Message], start: usize) -> Vec<Message> {
    let stays = |(index, message): &(usize, &Message)| *index >= start || message.role == "system";
    messages.iter().enumerate().filter(stays).map(|(_, message)| message.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Map;
    use text::Content;

    /// Words are messages, of which each takes one token; the letter is the role.
    fn check(conversation: &str, tokens_max: usize, expected: &str) {
        let message = |word: &str| {
            let role = match word.as_bytes()[0] {
                b's' => "system",
                b'u' => "user",
                b'a' => "assistant",
                _ => "tool",
            };
            Message { role: role.to_owned(), content: Content::Text(word.to_owned()), extra: Map::new() }
        };
        let messages: Vec<_> = conversation.split(' ').map(message).collect();
        let kept = longest(&messages, |messages| Ok(messages.len() <= tokens_max)).unwrap();
        let expected: Vec<_> = expected.split(' ').map(message).collect();
        assert_eq!(kept, expected, "{conversation} in {tokens_max}");
    }

    #[test]
    fn the_oldest_turns_are_left_out_and_system_messages_stay() {
        let conversation = "s1 u1 a1 t1 a2 u2 a3 u3";
        check(conversation, 8, conversation);
        check(conversation, 7, "s1 u2 a3 u3");
        check(conversation, 4, "s1 u2 a3 u3");
        check(conversation, 3, "s1 u3");
        check(conversation, 1, "s1 u3");
        check("u1", 0, "u1");
        check("s1 a1", 1, "s1 a1");
    }
}
