//! From the deltas of an answer to output items, and to the events that announce them.
//!
//! One item is open at a time; a delta of another kind closes it. A whole response is made from the very items whose
//! events a stream sends, so the two forms of an answer cannot differ.

use std::mem::take;

use text::Delta;

use super::reply::{EventKind, Item, Logprob, Part, ReplyRole, Status};

/// Every item of ours has at most one part.
const CONTENT_INDEX: usize = 0;

#[derive(Debug)]
pub struct Composer {
    items: Vec<Item>,
    open: Option<Open>,
    /// Of tokens whose text has not come yet.
    logprobs: Vec<Logprob>,
    fresh: fn(&str) -> String,
}

/// The item that grows.
#[derive(Debug)]
struct Open {
    kind: Kind,
    id: String,
    content: String,
    logprobs: Vec<Logprob>,
}

#[derive(Debug, PartialEq)]
enum Kind {
    Message,
    Reasoning,
    Call { call_id: String, name: String },
}

impl Composer {
    /// `fresh` makes ids, which begin with what it is given.
    pub fn new(fresh: fn(&str) -> String) -> Self {
        Self { items: Vec::new(), open: None, logprobs: Vec::new(), fresh }
    }

    /// Log probabilities of the tokens whose text comes next.
    pub fn note(&mut self, logprobs: impl IntoIterator<Item = Logprob>) {
        self.logprobs.extend(logprobs);
    }

    /// Takes the next delta; `send` gets its events.
    pub fn push(&mut self, delta: Delta, mut send: impl FnMut(EventKind)) {
        let logprobs = take(&mut self.logprobs);
        let content_index = CONTENT_INDEX;
        match delta {
            Delta::Text(delta) => {
                self.open(Kind::Message, &mut send);
                let Some((item_id, output_index)) = self.grow(&delta, &logprobs) else { return };
                send(EventKind::TextDelta { item_id, output_index, content_index, delta, logprobs });
            }
            Delta::Reasoning(delta) => {
                self.open(Kind::Reasoning, &mut send);
                let Some((item_id, output_index)) = self.grow(&delta, &[]) else { return };
                send(EventKind::ReasoningDelta { item_id, output_index, content_index, delta });
            }
            Delta::ToolCall { name, .. } => {
                let call_id = (self.fresh)("call_");
                self.open(Kind::Call { call_id, name }, &mut send);
            }
            Delta::Arguments { json, .. } => {
                let Some((item_id, output_index)) = self.grow(&json, &[]) else { return };
                send(EventKind::ArgumentsDelta { item_id, output_index, delta: json });
            }
        }
    }

    /// Closes what is open; `status` says whether it is complete.
    pub fn finish(&mut self, status: Status, mut send: impl FnMut(EventKind)) {
        let Some(open) = self.open.take() else { return };
        let (output_index, content_index) = (self.items.len(), CONTENT_INDEX);
        let (item_id, text, logprobs) = (open.id.clone(), open.content.clone(), open.logprobs.clone());
        send(match &open.kind {
            Kind::Message => EventKind::TextDone { item_id, output_index, content_index, text, logprobs },
            Kind::Reasoning => EventKind::ReasoningDone { item_id, output_index, content_index, text },
            Kind::Call { name, .. } => {
                EventKind::ArgumentsDone { item_id, output_index, name: name.clone(), arguments: text }
            }
        });
        if let Some(part) = open.part() {
            send(EventKind::PartDone { item_id: open.id.clone(), output_index, content_index, part });
        }
        let parts = open.part().into_iter().collect();
        let item = open.item(parts, status);
        send(EventKind::ItemDone { output_index, item: item.clone() });
        self.items.push(item);
    }

    /// The finished items.
    pub fn items(&self) -> &[Item] {
        &self.items
    }

    /// Goes on with the open item if it is of this kind, else begins one. Each call is an item of its own, for its id is
    /// new.
    fn open(&mut self, kind: Kind, send: &mut impl FnMut(EventKind)) {
        if self.open.as_ref().is_some_and(|open| open.kind == kind) {
            return;
        }
        self.finish(Status::Completed, &mut *send);
        let output_index = self.items.len();
        let id = (self.fresh)(kind.id_prefix());
        let open = Open { kind, id, content: String::new(), logprobs: Vec::new() };
        send(EventKind::ItemAdded { output_index, item: open.item(Vec::new(), Status::InProgress) });
        if let Some(part) = open.part() {
            send(EventKind::PartAdded { item_id: open.id.clone(), output_index, content_index: CONTENT_INDEX, part });
        }
        self.open = Some(open);
    }

    /// Adds to the open item and says which one that is.
    fn grow(&mut self, piece: &str, logprobs: &[Logprob]) -> Option<(String, usize)> {
        let open = self.open.as_mut()?;
        open.content.push_str(piece);
        open.logprobs.extend_from_slice(logprobs);
        Some((open.id.clone(), self.items.len()))
    }
}

impl Kind {
    fn id_prefix(&self) -> &'static str {
        match self {
            Self::Message => "msg_",
            Self::Reasoning => "rs_",
            Self::Call { .. } => "fc_",
        }
    }
}

impl Open {
    /// What the item holds so far; a call holds no part.
    fn part(&self) -> Option<Part> {
        let (text, logprobs) = (self.content.clone(), self.logprobs.clone());
        match self.kind {
            Kind::Message => Some(Part::OutputText { text, annotations: Vec::new(), logprobs }),
            Kind::Reasoning => Some(Part::ReasoningText { text }),
            Kind::Call { .. } => None,
        }
    }

    fn item(&self, content: Vec<Part>, status: Status) -> Item {
        let id = self.id.clone();
        match &self.kind {
            Kind::Message => Item::Message { id, status, role: ReplyRole::Assistant, content },
            Kind::Reasoning => Item::Reasoning { id, summary: Vec::new(), content, status },
            Kind::Call { call_id, name } => {
                let (call_id, name, arguments) = (call_id.clone(), name.clone(), self.content.clone());
                Item::FunctionCall { id, call_id, name, arguments, status }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// Runs an answer of these deltas; gives events and items as JSON.
    fn compose(deltas: Vec<(Vec<Logprob>, Delta)>, status: Status) -> (Vec<Value>, Value) {
        let mut composer = Composer::new(|prefix| format!("{prefix}1"));
        let mut sent = Vec::new();
        for (logprobs, delta) in deltas {
            composer.note(logprobs);
            composer.push(delta, |event| sent.push(event));
        }
        composer.finish(status, |event| sent.push(event));
        let events = sent.iter().map(|event| {
            let json = serde_json::to_value(event).unwrap();
            assert_eq!(json["type"], event.name());
            json
        });
        (events.collect(), serde_json::to_value(composer.items()).unwrap())
    }

    fn names(events: &[Value]) -> Vec<&str> {
        events.iter().map(|event| event["type"].as_str().unwrap().trim_start_matches("response.")).collect()
    }

    #[test]
    fn an_empty_answer_has_no_item_and_no_event() {
        let (events, items) = compose(vec![], Status::Completed);
        assert_eq!((events, items), (vec![], json!([])));
    }

    #[test]
    fn a_text_is_announced_grows_and_is_closed_with_its_part() {
        let text = |text: &str| (vec![], Delta::Text(text.into()));
        let (events, items) = compose(vec![text("he"), text("llo")], Status::Completed);
        let part = |text: &str| json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []});
        let item = |status: &str, content: Value| json!({"type": "message", "id": "msg_1", "status": status, "role": "assistant", "content": content});
        let at = |more: Value| {
            let mut event = json!({"item_id": "msg_1", "output_index": 0, "content_index": 0});
            event.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            event
        };
        let expected = vec![
            json!({"type": "response.output_item.added", "output_index": 0, "item": item("in_progress", json!([]))}),
            at(json!({"type": "response.content_part.added", "part": part("")})),
            at(json!({"type": "response.output_text.delta", "delta": "he", "logprobs": []})),
            at(json!({"type": "response.output_text.delta", "delta": "llo", "logprobs": []})),
            at(json!({"type": "response.output_text.done", "text": "hello", "logprobs": []})),
            at(json!({"type": "response.content_part.done", "part": part("hello")})),
            json!({"type": "response.output_item.done", "output_index": 0,
                "item": item("completed", json!([part("hello")]))}),
        ];
        assert_eq!(events, expected);
        assert_eq!(items, json!([item("completed", json!([part("hello")]))]));
    }

    #[test]
    fn reasoning_text_and_calls_are_items_one_after_the_other() {
        let deltas = [
            Delta::Reasoning("hm".into()),
            Delta::Text("well".into()),
            Delta::ToolCall { index: 0, name: "find".into() },
            Delta::Arguments { index: 0, json: "{".into() },
            Delta::Arguments { index: 0, json: "}".into() },
            Delta::ToolCall { index: 1, name: "stop".into() },
            Delta::Arguments { index: 1, json: "{\"a".into() },
        ];
        let (events, items) = compose(deltas.map(|delta| (vec![], delta)).into(), Status::Incomplete);
        let reasoning = ["output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"];
        let text = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done"];
        let done = ["content_part.done", "output_item.done"];
        let (delta, end) = ("function_call_arguments.delta", ["function_call_arguments.done", "output_item.done"]);
        let first_call = ["output_item.added", delta, delta];
        let second_call = ["output_item.added", delta];
        let expected = [&reasoning[..], &done, &text, &done, &first_call, &end, &second_call, &end].concat();
        assert_eq!(names(&events), expected);
        let call = |name: &str, arguments: &str, status: &str| {
            json!({"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": name, "arguments": arguments,
                "status": status})
        };
        assert_eq!(
            items,
            json!([
                {"type": "reasoning", "id": "rs_1", "summary": [], "status": "completed",
                    "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
                    "content": [{"type": "output_text", "text": "well", "annotations": [], "logprobs": []}]},
                call("find", "{}", "completed"),
                call("stop", "{\"a", "incomplete"),
            ])
        );
    }

    #[test]
    fn log_probabilities_go_with_the_text_and_never_with_reasoning() {
        let logprob = |token: &str| Logprob {
            token: token.to_owned(),
            bytes: token.as_bytes().to_vec(),
            logprob: -0.5,
            top_logprobs: Vec::new(),
        };
        let (events, items) = compose(
            vec![
                (vec![logprob("x")], Delta::Reasoning("x".into())),
                (vec![logprob("a"), logprob("b")], Delta::Text("ab".into())),
                (vec![logprob("c")], Delta::Text("c".into())),
            ],
            Status::Completed,
        );
        let tokens = |logprobs: &Value| {
            let tokens = logprobs.as_array().unwrap().iter().map(|one| one["token"].as_str().unwrap().to_owned());
            tokens.collect::<Vec<_>>()
        };
        let deltas = events.iter().filter(|event| event["type"] == "response.output_text.delta");
        assert_eq!(deltas.map(|event| tokens(&event["logprobs"])).collect::<Vec<_>>(), [vec!["a", "b"], vec!["c"]]);
        assert_eq!(tokens(&items[1]["content"][0]["logprobs"]), ["a", "b", "c"]);
    }
}
