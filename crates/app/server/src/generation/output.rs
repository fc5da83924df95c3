//! `ChoiceOutput`: the accumulated events of one choice.

use std::ops::Range;

use text::Delta;

use super::{ChoiceFinish, GenerationEvent, ScoredToken};

/// The whole output of one choice.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChoiceOutput {
    /// Text, reasoning and tool calls, in the order in which they were generated.
    pub blocks: Vec<OutputBlock>,
    /// Tokens with log probabilities, if they were requested.
    pub tokens: Vec<ScoredToken>,
    pub prompt: Vec<ScoredToken>,
    pub finish: ChoiceFinish,
}

/// Consecutive deltas of one kind. Each tool call is a block of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputBlock {
    pub kind: BlockKind,
    /// For a tool call: its arguments as JSON.
    pub text: String,
    /// The tokens of [`ChoiceOutput::tokens`] that this block was made of.
    pub tokens: Range<usize>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockKind {
    Text,
    Reasoning,
    ToolCall { name: String },
}

impl BlockKind {
    /// The kind of the block that `delta` starts.
    pub fn of(delta: &Delta) -> Self {
        match delta {
            Delta::Text(_) => Self::Text,
            Delta::Reasoning(_) => Self::Reasoning,
            Delta::ToolCall { name, .. } => Self::ToolCall { name: name.clone() },
            // Not reached: the parser returns the name of a call before its arguments.
            Delta::Arguments { .. } => Self::ToolCall { name: String::new() },
        }
    }

    /// Whether `delta` extends a block of this kind. If not, it starts the next block.
    pub fn accepts(&self, delta: &Delta) -> bool {
        matches!(
            (self, delta),
            (Self::Text, Delta::Text(_))
                | (Self::Reasoning, Delta::Reasoning(_))
                | (Self::ToolCall { .. }, Delta::Arguments { .. })
        )
    }
}

impl ChoiceOutput {
    pub fn push(&mut self, event: GenerationEvent) {
        match event {
            GenerationEvent::Prefilled { prompt } => self.prompt = prompt,
            GenerationEvent::Delta { deltas, tokens } => {
                self.tokens.extend(tokens);
                deltas.into_iter().for_each(|delta| self.push_delta(delta));
            }
            GenerationEvent::Finished(finish) => self.finish = finish,
        }
    }

    /// The text of all blocks of this kind.
    pub fn text(&self, kind: BlockKind) -> String {
        self.blocks.iter().filter(|block| block.kind == kind).map(|block| block.text.as_str()).collect()
    }

    fn push_delta(&mut self, delta: Delta) {
        if self.blocks.last().is_none_or(|block| !block.kind.accepts(&delta)) {
            let first = self.blocks.last().map_or(0, |block| block.tokens.end);
            let kind = BlockKind::of(&delta);
            self.blocks.push(OutputBlock { kind, text: String::new(), tokens: first..first });
        }
        let Some(block) = self.blocks.last_mut() else { return };
        block.tokens.end = self.tokens.len();
        match delta {
            Delta::Text(text) | Delta::Reasoning(text) | Delta::Arguments { json: text, .. } => block.text += &text,
            Delta::ToolCall { .. } => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use types::TokenId;

    #[test]
    fn events_add_up_to_blocks_and_each_block_has_its_tokens() {
        let mut output = ChoiceOutput::default();
        let token = |id| ScoredToken { id: TokenId(id), logprobs: None };
        let mut add = |deltas, tokens: &[u32]| {
            let tokens = tokens.iter().map(|&id| token(id)).collect();
            output.push(GenerationEvent::Delta { deltas, tokens });
        };
        add(vec![Delta::Reasoning("hm".into()), Delta::Text("I ".into())], &[1]);
        add(vec![], &[2]);
        add(vec![Delta::Text("call".into())], &[3]);
        add(vec![Delta::ToolCall { index: 0, name: "f".into() }], &[4]);
        add(vec![Delta::Arguments { index: 0, json: "{\"a\":".into() }], &[5]);
        add(vec![Delta::Arguments { index: 0, json: "1}".into() }], &[]);
        add(vec![Delta::ToolCall { index: 1, name: "g".into() }], &[6]);
        add(vec![], &[7]);
        output.push(GenerationEvent::Finished(ChoiceFinish::ToolCalls));
        let block = |kind, text: &str, tokens| OutputBlock { kind, text: text.to_owned(), tokens };
        let call = |name: &str| BlockKind::ToolCall { name: name.to_owned() };
        let expected = [
            block(BlockKind::Reasoning, "hm", 0..1),
            block(BlockKind::Text, "I call", 1..3),
            block(call("f"), "{\"a\":1}", 3..5),
            block(call("g"), "", 5..6),
        ];
        assert_eq!(output.blocks, expected);
        assert_eq!((output.tokens.len(), output.finish.clone()), (7, ChoiceFinish::ToolCalls));
        assert_eq!(output.text(BlockKind::Text), "I call");
    }
}
