//! `ApiError`: why a request gets no answer, in the terms that all APIs share.
//!
//! A handler returns it, from any depth. It carries no body: [`crate::envelope`] writes one in the form of the API that
//! was called. In the middle of a stream the handler writes [`ApiError::openai`] or [`ApiError::anthropic`] as an event.

use std::time::Duration;

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use engine::{EngineError, ExecutorError, Failure, SamplingParamsError, SubmitError};
use serde::Serialize;
use utoipa::ToSchema;

/// When to ask again where nobody knows better.
pub const SOON: Duration = Duration::from_secs(5);

/// What sort of mistake it is, and whose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The request cannot be answered as it is.
    Invalid,
    Authentication,
    NotFound,
    MethodNotAllowed,
    TooLarge,
    MediaType,
    /// Too much is waiting already: the same request may succeed later.
    Overloaded,
    /// A mistake of ours, or of the machine.
    Internal,
    /// Not yet, or not any more.
    Unavailable,
}

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    pub kind: ErrorKind,
    pub message: String,
    /// A word for programs, such as `context_length_exceeded`.
    pub code: Option<&'static str>,
    /// The field at fault: `messages[0].role`.
    pub param: Option<String>,
    pub retry_after: Option<Duration>,
}

impl ApiError {
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), code: None, param: None, retry_after: None }
    }

    /// A field has a value that cannot be used.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::new(ErrorKind::Invalid, message) }.code("invalid_value")
    }

    /// A field that we know, and do not support.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::invalid(param, message).code("unsupported_parameter")
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Internal, message)
    }

    pub fn unknown_model(name: &str) -> Self {
        let message = format!("the model `{name}` does not exist");
        Self { param: Some("model".to_owned()), ..Self::new(ErrorKind::NotFound, message) }.code("model_not_found")
    }

    pub fn unavailable(message: impl Into<String>, retry_after: Duration) -> Self {
        Self { retry_after: Some(retry_after), ..Self::new(ErrorKind::Unavailable, message) }
    }

    /// A part of the model's processes is gone and comes back: the same request may succeed later.
    pub fn rank_lost(message: impl Into<String>) -> Self {
        Self::unavailable(message, SOON).code("rank_lost")
    }

    pub fn shutting_down() -> Self {
        Self::unavailable("the server is shutting down", SOON).code("shutting_down")
    }

    pub fn code(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    pub fn param(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    pub fn status(&self) -> StatusCode {
        match self.kind {
            ErrorKind::Invalid => StatusCode::BAD_REQUEST,
            ErrorKind::Authentication => StatusCode::UNAUTHORIZED,
            ErrorKind::NotFound => StatusCode::NOT_FOUND,
            ErrorKind::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
            ErrorKind::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            ErrorKind::MediaType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            ErrorKind::Overloaded => StatusCode::TOO_MANY_REQUESTS,
            ErrorKind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
            ErrorKind::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// `{"error": {"message", "type", "param", "code"}}`
    pub fn openai(&self) -> OpenAiBody {
        let kind = match self.kind {
            ErrorKind::Authentication => "authentication_error",
            ErrorKind::NotFound => "not_found_error",
            ErrorKind::Overloaded => "rate_limit_error",
            ErrorKind::Internal => "server_error",
            ErrorKind::Unavailable => "service_unavailable",
            _ => "invalid_request_error",
        };
        let (message, param) = (self.message.clone(), self.param.clone());
        OpenAiBody { error: OpenAiDetail { message, r#type: kind, param, code: self.code } }
    }

    /// `{"type": "error", "error": {"type", "message"}}`
    pub fn anthropic(&self) -> AnthropicBody {
        let kind = match self.kind {
            ErrorKind::Authentication => "authentication_error",
            ErrorKind::NotFound => "not_found_error",
            ErrorKind::TooLarge => "request_too_large",
            ErrorKind::Overloaded => "rate_limit_error",
            ErrorKind::Unavailable => "overloaded_error",
            ErrorKind::Internal => "api_error",
            _ => "invalid_request_error",
        };
        AnthropicBody { r#type: "error", error: AnthropicDetail { r#type: kind, message: self.message.clone() } }
    }
}

/// Every error, as OpenAI writes it
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Error)]
pub struct OpenAiBody {
    error: OpenAiDetail,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ErrorDetail)]
struct OpenAiDetail {
    message: String,
    /// `invalid_request_error`, `authentication_error`, `not_found_error`, `rate_limit_error`, `server_error` or
    /// `service_unavailable`
    r#type: &'static str,
    /// The field at fault
    param: Option<String>,
    /// A word for programs, such as `context_length_exceeded`
    code: Option<&'static str>,
}

/// Every error, as Anthropic writes it
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = MessagesError)]
pub struct AnthropicBody {
    /// Always `error`
    r#type: &'static str,
    error: AnthropicDetail,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = MessagesErrorDetail)]
struct AnthropicDetail {
    /// `invalid_request_error`, `authentication_error`, `not_found_error`, `request_too_large`, `rate_limit_error`,
    /// `overloaded_error` or `api_error`
    r#type: &'static str,
    message: String,
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = self.status().into_response();
        response.extensions_mut().insert(self);
        response
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        let message = error.to_string();
        let invalid = Self::new(ErrorKind::Invalid, message.clone());
        match error {
            EngineError::PromptTooLong { .. } => invalid.code("context_length_exceeded"),
            EngineError::EmptyPrompt | EngineError::TokenOutOfRange { .. } => invalid.code("invalid_value"),
            EngineError::Sampling(error) => Self::from(error),
            EngineError::QueueFull { retry_after, .. } => {
                Self { retry_after: Some(retry_after), ..Self::new(ErrorKind::Overloaded, message) }.code("queue_full")
            }
            EngineError::Executor(error) => Self::from(&*error),
            EngineError::Busy => Self::internal(message),
        }
    }
}

impl From<&ExecutorError> for ApiError {
    fn from(error: &ExecutorError) -> Self {
        let message = error.to_string();
        if error.is_lost() { Self::rank_lost(message) } else { Self::internal(message) }
    }
}

impl From<Failure> for ApiError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Executor(error) => Self::from(&*error),
            Failure::Sample(_) | Failure::Constraint(_) => Self::internal(failure.to_string()),
        }
    }
}

impl From<SamplingParamsError> for ApiError {
    fn from(error: SamplingParamsError) -> Self {
        let param = match error {
            SamplingParamsError::OutOfRange { name, .. } => name,
            SamplingParamsError::BiasOutOfVocabulary { .. } => "logit_bias",
            SamplingParamsError::TooManyLogprobs { .. } => "top_logprobs",
        };
        Self::invalid(param, error.to_string())
    }
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> Self {
        match error {
            SubmitError::Refused(error) => error.into(),
            SubmitError::Draining => Self::shutting_down(),
            SubmitError::Stopped => Self::internal(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_lost_rank_comes_back_and_other_failures_of_the_executor_do_not() {
        let check = |error: ExecutorError, status: StatusCode, code: Option<&str>, types: (&str, &str)| {
            let error = Arc::new(error);
            let refused = ApiError::from(SubmitError::Refused(EngineError::Executor(Arc::clone(&error))));
            let failed = ApiError::from(Failure::Executor(error));
            assert_eq!(refused, failed);
            assert_eq!((failed.status(), failed.code), (status, code));
            assert_eq!(failed.retry_after.is_some(), code.is_some());
            assert_eq!((failed.openai().error.r#type, failed.anthropic().error.r#type), types);
        };
        let lost = ExecutorError::Lost { why: "rank 1: its process ended".into() };
        let away = ("service_unavailable", "overloaded_error");
        check(lost, StatusCode::SERVICE_UNAVAILABLE, Some("rank_lost"), away);
        let broken = ("server_error", "api_error");
        check(ExecutorError::NoStepInFlight, StatusCode::INTERNAL_SERVER_ERROR, None, broken);
        check(ExecutorError::OutOfSessions { max: 1 }, StatusCode::INTERNAL_SERVER_ERROR, None, broken);
    }
}
