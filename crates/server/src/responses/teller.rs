//! An answer, told as a response.

use super::compose::Composer;
use super::reply::{
    Event, EventKind, Failure, IncompleteDetails, IncompleteReason, InputDetails, Logprob, OutputDetails, Response,
    ResponseObject, Status, Usage,
};
use super::request::{Mode, Request, ToolChoice, Truncation};
use crate::answer::{self, Finish, Part, Token};
use crate::error::ApiError;
use crate::identity::{fresh, unix_now};
use crate::narrate::Narrator;
use crate::sse;

/// Writes a token's log probability in the words of this API.
type WriteLogprob = Box<dyn Fn(&Token) -> Option<Logprob> + Send>;

/// Sends the events of one response and keeps what it is made of.
pub struct Teller {
    response: Response,
    composer: Composer,
    /// Events so far.
    told: u64,
    /// What a token's log probabilities look like on the wire.
    logprob: WriteLogprob,
}

impl Teller {
    pub fn new(request: Request, logprob: impl Fn(&Token) -> Option<Logprob> + Send + 'static) -> Self {
        Self { response: begun(request), composer: Composer::new(fresh), told: 0, logprob: Box::new(logprob) }
    }

    /// The response so far: whole, once its last part was told.
    pub fn into_response(self) -> Response {
        self.response
    }

    fn number(&mut self, kind: EventKind) -> Event {
        let event = Event { kind, sequence_number: self.told };
        self.told += 1;
        event
    }

    fn say_all(&mut self, kinds: Vec<EventKind>, say: &mut dyn FnMut(Event)) {
        for kind in kinds {
            say(self.number(kind));
        }
    }

    /// Closes what is open and notes how it all ended.
    fn end(&mut self, status: Status, usage: Option<Usage>) -> Vec<EventKind> {
        let mut kinds = Vec::new();
        let of_item = if status == Status::Completed { Status::Completed } else { Status::Incomplete };
        self.composer.finish(of_item, |kind| kinds.push(kind));
        self.response.status = status;
        self.response.output = self.composer.items().to_vec();
        self.response.completed_at = (status == Status::Completed).then(unix_now);
        self.response.usage = usage;
        kinds
    }
}

impl Narrator for Teller {
    type Event = Event;

    fn begin(&mut self, say: &mut dyn FnMut(Event)) {
        let response = || Box::new(self.response.clone());
        let kinds = vec![EventKind::Created { response: response() }, EventKind::InProgress { response: response() }];
        self.say_all(kinds, say);
    }

    fn tell(&mut self, part: Part, usage: answer::Usage, say: &mut dyn FnMut(Event)) {
        let mut kinds = Vec::new();
        match part {
            Part::Prefilled { .. } => {}
            Part::Said { deltas, tokens } => {
                self.composer.note(tokens.iter().filter_map(&self.logprob));
                for delta in deltas {
                    self.composer.push(delta, |kind| kinds.push(kind));
                }
            }
            Part::Ended(Finish::Length) => {
                self.response.incomplete_details =
                    Some(IncompleteDetails { reason: IncompleteReason::MaxOutputTokens });
                kinds = self.end(Status::Incomplete, Some(usage.into()));
                kinds.push(EventKind::Incomplete { response: Box::new(self.response.clone()) });
            }
            Part::Ended(Finish::Stop | Finish::StopString(_) | Finish::ToolCalls) => {
                kinds = self.end(Status::Completed, Some(usage.into()));
                kinds.push(EventKind::Completed { response: Box::new(self.response.clone()) });
            }
        }
        self.say_all(kinds, say);
    }

    fn fail(&mut self, error: ApiError, say: &mut dyn FnMut(Event)) {
        self.response.error = Some(Failure { code: error.code.unwrap_or("server_error"), message: error.message });
        let mut kinds = self.end(Status::Failed, None);
        kinds.push(EventKind::Failed { response: Box::new(self.response.clone()) });
        self.say_all(kinds, say);
    }

    fn write(event: &Event) -> sse::Event {
        sse::Event::named(event.kind.name(), event)
    }
}

/// The response before anything was said, with the settings that it is made with.
fn begun(request: Request) -> Response {
    Response {
        id: fresh("resp_"),
        object: ResponseObject::Response,
        created_at: unix_now(),
        completed_at: None,
        status: Status::InProgress,
        error: None,
        incomplete_details: None,
        model: request.model,
        output: Vec::new(),
        usage: None,
        instructions: request.instructions,
        max_output_tokens: request.max_output_tokens,
        metadata: request.metadata.unwrap_or_default(),
        parallel_tool_calls: request.parallel_tool_calls.unwrap_or(true),
        previous_response_id: None,
        reasoning: request.reasoning.unwrap_or_default(),
        background: false,
        store: false,
        temperature: request.temperature,
        text: request.text.unwrap_or_default(),
        tool_choice: request.tool_choice.unwrap_or(ToolChoice::Mode(Mode::Auto)),
        tools: request.tools.unwrap_or_default(),
        top_logprobs: request.top_logprobs.unwrap_or(0),
        top_p: request.top_p,
        truncation: request.truncation.unwrap_or(Truncation::Disabled),
        user: request.user,
    }
}

impl From<answer::Usage> for Usage {
    fn from(usage: answer::Usage) -> Self {
        Self {
            input_tokens: usage.prompt_tokens,
            input_tokens_details: InputDetails { cached_tokens: usage.cached_tokens, cache_write_tokens: 0 },
            output_tokens: usage.completion_tokens,
            output_tokens_details: OutputDetails { reasoning_tokens: usage.reasoning_tokens },
            total_tokens: usage.total_tokens(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use text::Delta;

    fn told(parts: Vec<Result<Part, ApiError>>) -> Vec<Value> {
        let request = json!({"model": "m", "input": "hi", "store": true, "temperature": 0.5});
        let mut teller = Teller::new(serde_json::from_value(request).unwrap(), |_| None);
        let mut events = Vec::new();
        let mut say = |event| events.push(serde_json::to_value(event).unwrap());
        teller.begin(&mut say);
        let usage = answer::Usage { prompt_tokens: 5, cached_tokens: 2, completion_tokens: 3, reasoning_tokens: 1 };
        for part in parts {
            match part {
                Ok(part) => teller.tell(part, usage, &mut say),
                Err(error) => teller.fail(error, &mut say),
            }
        }
        for (number, event) in events.iter().enumerate() {
            assert_eq!(event["sequence_number"], number);
        }
        events
    }

    fn said(text: &str) -> Result<Part, ApiError> {
        Ok(Part::Said { deltas: vec![Delta::Text(text.to_owned())], tokens: vec![] })
    }

    #[test]
    fn a_response_begins_at_once_and_ends_with_all_that_was_said() {
        let events = told(vec![Ok(Part::Prefilled { prompt: vec![] }), said("hello"), Ok(Part::Ended(Finish::Stop))]);
        assert_eq!(events[0]["type"], "response.created");
        assert_eq!(events[1]["type"], "response.in_progress");
        assert_eq!(events[1]["response"]["status"], "in_progress");
        let last = &events.last().unwrap();
        assert_eq!(last["type"], "response.completed");
        let response = &last["response"];
        assert_eq!(response["id"], events[0]["response"]["id"]);
        assert_eq!(response["status"], "completed");
        assert_eq!(response["store"], false);
        assert_eq!(response["temperature"], 0.5);
        assert_eq!(response["output"][0]["content"][0]["text"], "hello");
        assert_eq!(
            response["usage"],
            json!({"input_tokens": 5, "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
                "output_tokens": 3, "output_tokens_details": {"reasoning_tokens": 1}, "total_tokens": 8})
        );
    }

    #[test]
    fn too_few_tokens_leave_a_response_incomplete() {
        let events = told(vec![said("hel"), Ok(Part::Ended(Finish::Length))]);
        let last = events.last().unwrap();
        assert_eq!(last["type"], "response.incomplete");
        assert_eq!(last["response"]["incomplete_details"], json!({"reason": "max_output_tokens"}));
        assert_eq!(last["response"]["output"][0]["status"], "incomplete");
    }

    #[test]
    fn a_failure_is_told_by_its_code_and_what_was_said_stays() {
        let check = |error: ApiError, code: &str| {
            let message = error.message.clone();
            let events = told(vec![said("hel"), Err(error)]);
            let last = events.last().unwrap();
            assert_eq!(last["type"], "response.failed");
            assert_eq!(last["response"]["error"], json!({"code": code, "message": message}));
            assert_eq!(last["response"]["output"][0]["content"][0]["text"], "hel");
        };
        check(ApiError::internal("the device is gone"), "server_error");
        check(ApiError::rank_lost("rank 1 is gone"), "rank_lost");
        check(ApiError::shutting_down(), "shutting_down");
    }
}
