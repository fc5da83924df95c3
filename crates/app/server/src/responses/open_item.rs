//! `OpenItem`: the output item that is being streamed.

use text::Delta;

use super::custom_input::CustomInput;
use super::response::{
    ResponsesEventKind, ResponsesItem, ResponsesLogprob, ResponsesPart, ResponsesReplyRole, ResponsesStatus,
};
use super::tools::{CallForm, CallForms, shell_action};
use crate::generation::BlockKind;

/// Each item has at most one part.
const CONTENT_INDEX: usize = 0;

pub struct OpenItem {
    block: BlockKind,
    kind: ItemKind,
    id: String,
    /// Empty unless the item is a tool call.
    call_id: String,
    output_index: usize,
    /// The text, or the arguments or the input of a call.
    text: String,
    logprobs: Vec<ResponsesLogprob>,
}

enum ItemKind {
    Message,
    Reasoning,
    Function { namespace: Option<String>, name: String },
    Custom { namespace: Option<String>, name: String, input: CustomInput },
    Shell,
}

impl OpenItem {
    /// The item that `delta` starts.
    pub fn new(delta: &Delta, output_index: usize, forms: &CallForms, new_id: fn(&str) -> String) -> Self {
        let block = BlockKind::of(delta);
        let (prefix, kind) = match &block {
            BlockKind::Text => ("msg_", ItemKind::Message),
            BlockKind::Reasoning => ("rs_", ItemKind::Reasoning),
            BlockKind::ToolCall { name } => match forms.form(name) {
                CallForm::Function { namespace, name } => ("fc_", ItemKind::Function { namespace, name }),
                CallForm::Custom { namespace, name } => {
                    ("ctc_", ItemKind::Custom { namespace, name, input: CustomInput::default() })
                }
                CallForm::Shell => ("lsh_", ItemKind::Shell),
            },
        };
        let call_id = if matches!(block, BlockKind::ToolCall { .. }) { new_id("call_") } else { String::new() };
        let (id, text, logprobs) = (new_id(prefix), String::new(), Vec::new());
        Self { block, kind, id, call_id, output_index, text, logprobs }
    }

    pub fn accepts(&self, delta: &Delta) -> bool {
        self.block.accepts(delta)
    }

    /// The events that announce the item.
    pub fn added(&self) -> Vec<ResponsesEventKind> {
        let (item_id, output_index) = self.place();
        let item = self.item(false, ResponsesStatus::InProgress);
        let part = self.part().map(|part| {
            let content_index = CONTENT_INDEX;
            ResponsesEventKind::PartAdded { item_id, output_index, content_index, part }
        });
        [ResponsesEventKind::ItemAdded { output_index, item }].into_iter().chain(part).collect()
    }

    /// Extends the item.
    pub fn push(&mut self, delta: Delta, logprobs: Vec<ResponsesLogprob>) -> Option<ResponsesEventKind> {
        let ((item_id, output_index), content_index) = (self.place(), CONTENT_INDEX);
        match delta {
            Delta::Text(delta) => {
                self.text += &delta;
                self.logprobs.extend_from_slice(&logprobs);
                Some(ResponsesEventKind::TextDelta { item_id, output_index, content_index, delta, logprobs })
            }
            Delta::Reasoning(delta) => {
                self.text += &delta;
                Some(ResponsesEventKind::ReasoningDelta { item_id, output_index, content_index, delta })
            }
            Delta::Arguments { json, .. } => match &mut self.kind {
                ItemKind::Custom { input, .. } => {
                    let delta = input.push(&json);
                    self.custom_delta(delta)
                }
                // The command is sent as a whole.
                ItemKind::Shell => {
                    self.text += &json;
                    None
                }
                _ => {
                    self.text += &json;
                    Some(ResponsesEventKind::ArgumentsDelta { item_id, output_index, delta: json })
                }
            },
            Delta::ToolCall { .. } => None,
        }
    }

    /// Closes the item: the events that do so, and the item.
    pub fn close(mut self, status: ResponsesStatus) -> (Vec<ResponsesEventKind>, ResponsesItem) {
        let mut events = Vec::new();
        if let ItemKind::Custom { input, .. } = &mut self.kind {
            let rest = std::mem::take(input).finish();
            events.extend(self.custom_delta(rest));
        }
        let ((item_id, output_index), content_index) = (self.place(), CONTENT_INDEX);
        let (text, logprobs) = (self.text.clone(), self.logprobs.clone());
        events.extend(match &self.kind {
            ItemKind::Message => {
                Some(ResponsesEventKind::TextDone { item_id, output_index, content_index, text, logprobs })
            }
            ItemKind::Reasoning => {
                Some(ResponsesEventKind::ReasoningDone { item_id, output_index, content_index, text })
            }
            ItemKind::Function { name, .. } => {
                let name = name.clone();
                Some(ResponsesEventKind::ArgumentsDone { item_id, output_index, name, arguments: text })
            }
            ItemKind::Custom { .. } => Some(ResponsesEventKind::CustomInputDone { item_id, output_index, input: text }),
            ItemKind::Shell => None,
        });
        events.extend(self.part().map(|part| {
            let item_id = self.id.clone();
            ResponsesEventKind::PartDone { item_id, output_index, content_index, part }
        }));
        let item = self.item(true, status);
        events.push(ResponsesEventKind::ItemDone { output_index, item: item.clone() });
        (events, item)
    }

    fn place(&self) -> (String, usize) {
        (self.id.clone(), self.output_index)
    }

    fn custom_delta(&mut self, delta: String) -> Option<ResponsesEventKind> {
        self.text += &delta;
        let (item_id, output_index) = self.place();
        (!delta.is_empty()).then_some(ResponsesEventKind::CustomInputDelta { item_id, output_index, delta })
    }

    /// The content of the item so far; `None` for a tool call.
    fn part(&self) -> Option<ResponsesPart> {
        let (text, logprobs) = (self.text.clone(), self.logprobs.clone());
        match self.kind {
            ItemKind::Message => Some(ResponsesPart::OutputText { text, annotations: Vec::new(), logprobs }),
            ItemKind::Reasoning => Some(ResponsesPart::ReasoningText { text }),
            ItemKind::Function { .. } | ItemKind::Custom { .. } | ItemKind::Shell => None,
        }
    }

    /// The item, with or without its part.
    fn item(&self, with_part: bool, status: ResponsesStatus) -> ResponsesItem {
        let content = self.part().filter(|_| with_part).into_iter().collect();
        let (id, call_id, text) = (self.id.clone(), self.call_id.clone(), self.text.clone());
        match &self.kind {
            ItemKind::Message => ResponsesItem::Message { id, status, role: ResponsesReplyRole::Assistant, content },
            ItemKind::Reasoning => ResponsesItem::Reasoning { id, summary: Vec::new(), content, status },
            ItemKind::Function { namespace, name } => {
                let (namespace, name) = (namespace.clone(), name.clone());
                ResponsesItem::FunctionCall { id, call_id, name, namespace, arguments: text, status }
            }
            ItemKind::Custom { namespace, name, .. } => {
                let (namespace, name) = (namespace.clone(), name.clone());
                ResponsesItem::CustomToolCall { id, call_id, name, namespace, input: text, status }
            }
            ItemKind::Shell => ResponsesItem::LocalShellCall { id, call_id, action: shell_action(&text), status },
        }
    }
}
