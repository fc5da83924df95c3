//! The error responses that `/openapi.json` lists for each request to a model.

use std::collections::BTreeMap;

use utoipa::openapi::{Content, Ref, RefOr, Response, ResponseBuilder};
use utoipa::{IntoResponses, ToSchema};

use crate::error::{MessagesErrorBody, OllamaErrorBody, OpenAiErrorBody};

const ERRORS: [(&str, &str); 9] = [
    ("400", "The request cannot be answered as it is"),
    ("401", "No key, or an unknown one"),
    ("403", "The server has no API keys, and the `Host` is not one of its names"),
    ("404", "No such model"),
    ("413", "The body is too long"),
    ("415", "The body is not JSON"),
    ("429", "Too many requests are waiting"),
    ("500", "The model failed"),
    ("503", "The model is not loaded yet, or not any more, or is being rebuilt"),
];

/// With the bodies of OpenAI's APIs.
pub enum OpenAiErrors {}

impl IntoResponses for OpenAiErrors {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        error_responses::<OpenAiErrorBody>()
    }
}

/// With the bodies of Anthropic's API.
pub enum MessagesErrors {}

impl IntoResponses for MessagesErrors {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        error_responses::<MessagesErrorBody>()
    }
}

/// With the bodies of Ollama's API.
pub enum OllamaErrors {}

impl IntoResponses for OllamaErrors {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        error_responses::<OllamaErrorBody>()
    }
}

/// Refers to `B` by its schema's name; the document of each API must list that schema.
fn error_responses<B: ToSchema>() -> BTreeMap<String, RefOr<Response>> {
    let body = || Content::new(Some(Ref::from_schema_name(B::name())));
    let response = |(status, description): (&str, &str)| {
        let response = ResponseBuilder::new().description(description).content("application/json", body()).build();
        (status.to_owned(), RefOr::T(response))
    };
    ERRORS.into_iter().map(response).collect()
}
