//! How a request to a model may fail, for the document: one list for all APIs, each with the body that it writes.

use std::collections::BTreeMap;

use utoipa::openapi::{Content, Ref, RefOr, Response, ResponseBuilder};
use utoipa::{IntoResponses, ToSchema};

use crate::error::{AnthropicBody, OpenAiBody};

const FAILURES: [(&str, &str); 8] = [
    ("400", "The request cannot be answered as it is"),
    ("401", "No key, or an unknown one"),
    ("404", "No such model"),
    ("413", "The body is too long"),
    ("415", "The body is not JSON"),
    ("429", "Too many requests are waiting"),
    ("500", "The model failed"),
    ("503", "The model is not loaded yet, or not any more, or is being rebuilt"),
];

/// The failures of OpenAI's APIs, and of those that have its form.
pub enum OpenAiFailures {}

impl IntoResponses for OpenAiFailures {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        failures::<OpenAiBody>()
    }
}

/// The failures of Anthropic's API.
pub enum AnthropicFailures {}

impl IntoResponses for AnthropicFailures {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        failures::<AnthropicBody>()
    }
}

/// Refers to `B` by its name: the document of an API lists it among its schemas.
fn failures<B: ToSchema>() -> BTreeMap<String, RefOr<Response>> {
    let body = || Content::new(Some(Ref::from_schema_name(B::name())));
    let failure = |(status, description): (&str, &str)| {
        let response = ResponseBuilder::new().description(description).content("application/json", body()).build();
        (status.to_owned(), RefOr::T(response))
    };
    FAILURES.into_iter().map(failure).collect()
}
