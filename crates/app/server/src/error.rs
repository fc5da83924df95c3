//! `ApiError`: why a request failed, in terms that all APIs share.
//!
//! Handlers return it. Its response has no body: [`crate::error_body`] writes one in the format of the API that was called.
//! In mid-stream an encoder sends [`ApiError::openai_body`], [`ApiError::messages_body`] or [`ApiError::ollama_body`] as an
//! event.

use std::time::Duration;

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use engine::{EngineError, ExecutorError, Failure, SamplingParamsError, SubmitError};
use serde::Serialize;
use utoipa::ToSchema;

use crate::excerpt::{bounded_message, excerpt};
use crate::redact::without_paths;

/// The default of [`ApiError::retry_after`] for temporary errors.
pub const RETRY_AFTER: Duration = Duration::from_secs(5);

/// Decides the HTTP status, and the `type` that clients see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ApiErrorKind {
    /// The request is wrong, and a retry would fail too.
    Invalid,
    Authentication,
    /// The caller must not use this server.
    Forbidden,
    NotFound,
    MethodNotAllowed,
    TooLarge,
    MediaType,
    /// The queue is full: the same request may succeed later.
    Overloaded,
    /// A fault of the server or of the machine.
    Internal,
    /// The model is loading, draining or being rebuilt.
    Unavailable,
}

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    pub kind: ApiErrorKind,
    pub message: String,
    /// A machine-readable code, such as `context_length_exceeded`.
    pub code: Option<&'static str>,
    /// The field that is wrong: `messages[0].role`.
    pub param: Option<String>,
    pub retry_after: Option<Duration>,
    /// Replaces `message` in Anthropic's format, whose clients match other words.
    messages_message: Option<String>,
}

impl ApiError {
    /// Cuts a message that is too long: it may repeat what a client has sent.
    pub fn new(kind: ApiErrorKind, message: impl Into<String>) -> Self {
        let message = bounded_message(message.into());
        Self { kind, message, code: None, param: None, retry_after: None, messages_message: None }
    }

    /// A field has a value that cannot be used.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ApiErrorKind::Invalid, message).param(param).code("invalid_value")
    }

    /// A required field is absent.
    pub fn missing(param: impl Into<String>) -> Self {
        let param = param.into();
        let message = format!("`{param}` is missing");
        Self::invalid(param, message).code("missing_required_parameter")
    }

    /// A known field that is not supported.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::invalid(param, message).code("unsupported_parameter")
    }

    /// Reasons come from the machine, so paths are removed. The log has the whole reason.
    pub fn internal(message: impl AsRef<str>) -> Self {
        let redacted = without_paths(message.as_ref());
        if redacted != message.as_ref() {
            tracing::warn!(reason = %message.as_ref(), "a request failed");
        }
        Self::new(ApiErrorKind::Internal, redacted)
    }

    pub fn unknown_model(name: &str) -> Self {
        let message = format!("the model `{}` does not exist", excerpt(name));
        Self::new(ApiErrorKind::NotFound, message).param("model").code("model_not_found")
    }

    /// The prompt does not fit beside an answer. Clients recognise the beginning of either message. `tokens` is a lower
    /// bound if `is_bound`.
    pub fn context_exceeded(tokens: usize, max: usize, is_bound: bool) -> Self {
        let at_least = if is_bound { "at least " } else { "" };
        let message = format!(
            "This model's maximum context length is {max} tokens. However, your prompt has {at_least}{tokens} tokens, which \
             leaves none for an answer. Please reduce the length of the prompt."
        );
        let for_messages = format!("prompt is too long: {at_least}{tokens} tokens > {} maximum", max.saturating_sub(1));
        Self { messages_message: Some(for_messages), ..Self::new(ApiErrorKind::Invalid, message) }
            .code("context_length_exceeded")
    }

    /// Reasons come from the machine, so paths are removed.
    pub fn unavailable(message: impl AsRef<str>, retry_after: Duration) -> Self {
        let message = without_paths(message.as_ref());
        Self { retry_after: Some(retry_after), ..Self::new(ApiErrorKind::Unavailable, message) }
    }

    /// A rank was lost and is being replaced: the same request may succeed later.
    pub fn rank_lost(message: impl AsRef<str>) -> Self {
        Self::unavailable(message, RETRY_AFTER).code("rank_lost")
    }

    pub fn shutting_down() -> Self {
        Self::unavailable("the server is shutting down", RETRY_AFTER).code("shutting_down")
    }

    pub fn code(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    pub fn param(mut self, param: impl Into<String>) -> Self {
        self.param = Some(excerpt(&param.into()).into_owned());
        self
    }

    pub fn status(&self) -> StatusCode {
        match self.kind {
            ApiErrorKind::Invalid => StatusCode::BAD_REQUEST,
            ApiErrorKind::Authentication => StatusCode::UNAUTHORIZED,
            ApiErrorKind::Forbidden => StatusCode::FORBIDDEN,
            ApiErrorKind::NotFound => StatusCode::NOT_FOUND,
            ApiErrorKind::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
            ApiErrorKind::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            ApiErrorKind::MediaType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            ApiErrorKind::Overloaded => StatusCode::TOO_MANY_REQUESTS,
            ApiErrorKind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
            ApiErrorKind::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// `{"error": {"message", "type", "param", "code"}}`
    pub fn openai_body(&self) -> OpenAiErrorBody {
        let kind = match self.kind {
            ApiErrorKind::Authentication => "authentication_error",
            ApiErrorKind::Forbidden => "permission_error",
            ApiErrorKind::NotFound => "not_found_error",
            ApiErrorKind::Overloaded => "rate_limit_error",
            ApiErrorKind::Internal => "server_error",
            ApiErrorKind::Unavailable => "service_unavailable",
            _ => "invalid_request_error",
        };
        let (message, param) = (self.message.clone(), self.param.clone());
        OpenAiErrorBody { error: OpenAiErrorDetail { message, r#type: kind, param, code: self.code } }
    }

    /// `{"type": "error", "error": {"type", "message"}}`
    pub fn messages_body(&self) -> MessagesErrorBody {
        let kind = match self.kind {
            ApiErrorKind::Authentication => "authentication_error",
            ApiErrorKind::Forbidden => "permission_error",
            ApiErrorKind::NotFound => "not_found_error",
            ApiErrorKind::TooLarge => "request_too_large",
            ApiErrorKind::Overloaded => "rate_limit_error",
            ApiErrorKind::Unavailable => "overloaded_error",
            ApiErrorKind::Internal => "api_error",
            _ => "invalid_request_error",
        };
        MessagesErrorBody {
            r#type: "error",
            error: MessagesErrorDetail {
                r#type: kind,
                message: self.messages_message.as_ref().unwrap_or(&self.message).clone(),
            },
        }
    }

    /// `{"error": message}`
    pub fn ollama_body(&self) -> OllamaErrorBody {
        OllamaErrorBody { error: self.message.clone() }
    }
}

/// Every error, in OpenAI's format
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Error)]
pub struct OpenAiErrorBody {
    error: OpenAiErrorDetail,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ErrorDetail)]
struct OpenAiErrorDetail {
    message: String,
    /// `invalid_request_error`, `authentication_error`, `permission_error`, `not_found_error`, `rate_limit_error`,
    /// `server_error` or `service_unavailable`
    r#type: &'static str,
    /// The field that is wrong
    param: Option<String>,
    /// Machine-readable code, such as `context_length_exceeded`
    code: Option<&'static str>,
}

/// Every error, in Anthropic's format
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = MessagesError)]
pub struct MessagesErrorBody {
    /// Always `error`
    r#type: &'static str,
    error: MessagesErrorDetail,
}

#[derive(Debug, Serialize, ToSchema)]
struct MessagesErrorDetail {
    /// `invalid_request_error`, `authentication_error`, `permission_error`, `not_found_error`, `request_too_large`,
    /// `rate_limit_error`, `overloaded_error` or `api_error`
    r#type: &'static str,
    message: String,
}

/// Every error, in Ollama's format
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OllamaError)]
pub struct OllamaErrorBody {
    error: String,
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
        let invalid = Self::new(ApiErrorKind::Invalid, message.clone());
        match error {
            EngineError::PromptTooLong { tokens, max } => Self::context_exceeded(tokens, max, false),
            EngineError::EmptyPrompt | EngineError::TokenOutOfRange { .. } => invalid.code("invalid_value"),
            EngineError::Sampling(error) => Self::from(error),
            EngineError::QueueFull { retry_after, .. } => {
                Self { retry_after: Some(retry_after), ..Self::new(ApiErrorKind::Overloaded, message) }
                    .code("queue_full")
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
            Failure::NoStates => Self::new(ApiErrorKind::Invalid, failure.to_string()).code("states_unavailable"),
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
    fn clients_see_no_path_of_this_machine() {
        let error = ApiError::internal("read /srv/models/my model.gguf: it is gone");
        assert_eq!(error.message, "read …: it is gone");
    }

    #[test]
    fn what_a_chain_cannot_give_is_not_a_fault_of_the_machine() {
        let error = ApiError::from(Failure::NoStates);
        assert_eq!((error.status(), error.code), (StatusCode::BAD_REQUEST, Some("states_unavailable")));
    }

    #[test]
    fn a_lost_rank_comes_back_and_other_failures_of_the_executor_do_not() {
        let check = |error: ExecutorError, status: StatusCode, code: Option<&str>, types: (&str, &str)| {
            let error = Arc::new(error);
            let refused = ApiError::from(SubmitError::Refused(EngineError::Executor(Arc::clone(&error))));
            let failed = ApiError::from(Failure::Executor(error));
            assert_eq!(refused, failed);
            assert_eq!((failed.status(), failed.code), (status, code));
            assert_eq!(failed.retry_after.is_some(), code.is_some());
            assert_eq!((failed.openai_body().error.r#type, failed.messages_body().error.r#type), types);
        };
        let lost = ExecutorError::Lost { why: "rank 1: its process ended".into() };
        let away = ("service_unavailable", "overloaded_error");
        check(lost, StatusCode::SERVICE_UNAVAILABLE, Some("rank_lost"), away);
        let broken = ("server_error", "api_error");
        check(ExecutorError::NoStepInFlight, StatusCode::INTERNAL_SERVER_ERROR, None, broken);
        check(ExecutorError::OutOfSessions { max: 1 }, StatusCode::INTERNAL_SERVER_ERROR, None, broken);
    }
}
