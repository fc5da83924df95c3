//! Leaves out the oldest messages of a conversation that does not fit into the context.
//!
//! Instructions at the start stay. Whole turns are left out first, so that the conversation still starts with the user. If
//! the last turn alone does not fit, its first tool calls are left out, with their results.

use text::Message;
use types::TokenId;

use crate::error::ApiError;

/// A prompt as text and as tokens.
type RenderedPrompt = (String, Vec<TokenId>);

/// The prompt of the longest conversation that has at most `tokens_max` tokens. If none has, the result of the shortest.
pub fn fit(
    messages: &[Message],
    tokens_max: usize,
    render: impl Fn(&[Message]) -> Result<RenderedPrompt, ApiError>,
) -> Result<RenderedPrompt, ApiError> {
    // A prompt that is far too long is not even encoded.
    let render = |messages: &[Message]| match render(messages) {
        Err(error) if error.code != Some("context_length_exceeded") => Err(error),
        prompt => Ok(prompt),
    };
    let fits =
        |prompt: &Result<RenderedPrompt, ApiError>| prompt.as_ref().is_ok_and(|(_, tokens)| tokens.len() <= tokens_max);
    let mut prompt = render(messages)?;
    if fits(&prompt) {
        return prompt;
    }
    let cuts = Cut::all(messages);
    // Each cut leaves out more than the one before it.
    let (mut first, mut end) = (0, cuts.len());
    while first < end {
        let middle = first.midpoint(end);
        let shorter = render(&cuts[middle].apply(messages))?;
        if fits(&shorter) {
            (end, prompt) = (middle, shorter);
        } else {
            first = middle + 1;
            if first == cuts.len() {
                prompt = shorter;
            }
        }
    }
    tracing::info!(messages = messages.len(), "the oldest messages of a conversation were left out");
    prompt
}

/// What remains of a conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    /// The instructions at the start.
    instructions: usize,
    /// The user's message of the last turn, if `from` is within that turn.
    user: Option<usize>,
    from: usize,
}

impl Cut {
    fn all(messages: &[Message]) -> Vec<Self> {
        let is = |index: usize, roles: &[&str]| roles.contains(&messages[index].role.as_str());
        let instructions =
            messages.iter().take_while(|message| ["system", "developer"].contains(&&*message.role)).count();
        let rest = instructions + 1..messages.len();
        let turns = rest.clone().filter(|&index| is(index, &["user"]));
        let turns = turns.map(|from| Self { instructions, user: None, from });
        let user = (instructions..messages.len()).rev().find(|&index| is(index, &["user"]));
        let calls = rest.filter(|&index| user.is_some_and(|user| index > user + 1) && is(index, &["assistant"]));
        turns.chain(calls.map(|from| Self { instructions, user, from })).collect()
    }

    fn apply(self, messages: &[Message]) -> Vec<Message> {
        let user = self.user.map(|user| &messages[user]);
        messages[..self.instructions].iter().chain(user).chain(&messages[self.from..]).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each message is a role and a length: a token for each character.
    fn check(conversation: &str, tokens_max: usize, expected: &str) {
        let message = |word: &str| {
            let role = match word.as_bytes()[0] {
                b's' => "system",
                b'u' => "user",
                b'a' => "assistant",
                _ => "tool",
            };
            Message::new(role, word)
        };
        let messages: Vec<_> = conversation.split(' ').map(message).collect();
        let render = |messages: &[Message]| {
            let texts: Vec<String> = messages.iter().map(Message::text).collect();
            let tokens = texts.iter().flat_map(|text| text.bytes()).map(|byte| TokenId(byte.into())).collect();
            Ok((texts.join(" "), tokens))
        };
        assert_eq!(fit(&messages, tokens_max, render).unwrap().0, expected, "{conversation} in {tokens_max}");
    }

    #[test]
    fn the_oldest_turns_go_first_and_instructions_stay() {
        let conversation = "s1 u1 a1 t1 a2 u2 a3 u3";
        check(conversation, 16, conversation);
        check(conversation, 15, "s1 u2 a3 u3");
        check(conversation, 8, "s1 u2 a3 u3");
        check(conversation, 7, "s1 u3");
        check(conversation, 1, "s1 u3");
    }

    #[test]
    fn then_the_oldest_calls_of_the_last_turn() {
        let conversation = "s1 u1 a1 u2 a2 t2 a3 t3";
        check(conversation, 12, "s1 u2 a2 t2 a3 t3");
        check(conversation, 11, "s1 u2 a3 t3");
        check(conversation, 1, "s1 u2 a3 t3");
    }

    #[test]
    fn a_conversation_without_turns_stays_as_it_is() {
        check("s1 a1 a2", 1, "s1 a1 a2");
        check("u1", 1, "u1");
    }
}
