//! Routes that change Ollama's library of models: downloads, aliases, and what is deleted.
//!
//! A server of one model refuses them, but for the download of that model, which it has.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use axum::Json;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::mpsc;
use utoipa::ToSchema;

use super::LATEST;
use super::models::{OllamaModelName, model_name};
use crate::app::{App, SharedApp};
use crate::error::{ApiError, ApiErrorKind};
use crate::error_responses::OllamaErrors;
use crate::json_body::JsonBody;
use crate::local_operator::LocalOperator;
use crate::models::{LibraryError, ModelLibrary, PullProgress, not_managed, on_thread};
use crate::sse;
use crate::stream::StreamEvent;

/// How often a stream tells how far a download is.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);
const PROGRESS_MAX: usize = 16;

/// A model to download
#[derive(Debug, Deserialize, ToSchema)]
pub struct OllamaPullRequest {
    /// Model name, with or without `:latest`
    pub model: Option<String>,
    /// The older name of `model`
    pub name: Option<String>,
    /// False: one reply instead of a stream
    pub stream: Option<bool>,
}

/// A name that is to stand for a model. What changes the model itself is refused
#[derive(Debug, Deserialize, ToSchema)]
pub struct OllamaCreateRequest {
    /// The new name
    pub model: Option<String>,
    /// The older name of `model`
    pub name: Option<String>,
    /// The model that it stands for
    pub from: Option<String>,
    /// The older form of `from`: its one line may be `FROM name`
    pub modelfile: Option<String>,
    /// Not supported: refused unless empty
    pub system: Option<String>,
    /// Not supported: refused unless empty
    pub template: Option<String>,
    /// Not supported: refused unless empty
    pub parameters: Option<Value>,
    /// Not supported: refused unless empty
    pub files: Option<Value>,
    /// Not supported: refused unless empty
    pub adapters: Option<Value>,
    /// Not supported: refused unless empty
    pub messages: Option<Value>,
    /// Not supported: refused unless empty
    pub quantize: Option<String>,
    /// False: one reply instead of a stream
    pub stream: Option<bool>,
}

/// A model, and a further name for it
#[derive(Debug, Deserialize, ToSchema)]
pub struct OllamaCopyRequest {
    pub source: String,
    pub destination: String,
}

/// A line of the stream
#[derive(Serialize, ToSchema)]
pub struct OllamaProgress {
    /// Such as `pulling manifest`; the last one is `success`
    status: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    digest: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    total: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    completed: Option<u64>,
}

impl OllamaProgress {
    fn status(status: &str) -> Self {
        Self { status: status.to_owned(), digest: None, total: None, completed: None }
    }

    fn of_file(progress: PullProgress) -> Self {
        let PullProgress { file, digest, done, total } = progress;
        let digest = digest.map(|digest| format!("sha256:{digest}"));
        Self { status: format!("pulling {file}"), digest, total: Some(total), completed: Some(done) }
    }
}

/// Download a model
#[utoipa::path(
    post, path = "/api/pull", tag = "ollama", security(("key" = []), ("x-api-key" = [])),
    request_body = OllamaPullRequest,
    responses(
        (status = 200, description = "The model is here; with a stream, also `{\"error\": …}`",
            content((OllamaProgress = "application/json"), (OllamaProgress = "application/x-ndjson"))),
        OllamaErrors,
    )
)]
pub async fn pull(
    State(app): State<SharedApp>,
    operator: Result<LocalOperator, ApiError>,
    JsonBody(request, _): JsonBody<OllamaPullRequest>,
) -> Result<Response, ApiError> {
    let name = model_name(OllamaModelName { model: request.model, name: request.name })?;
    let streams = request.stream != Some(false);
    let Some(library) = app.models().library().cloned() else {
        if !app.has_model(untagged(&name)).await? && !app.has_model(&name).await? {
            return Err(not_managed());
        }
        return Ok(done(streams));
    };
    operator?;
    let permit = app.models().begin_pull()?;
    let (sender, receiver) = mpsc::channel(PROGRESS_MAX);
    let pulled = on_thread(move || {
        let _permit = permit;
        pull_to(&*library, untagged(&name), &sender)
    });
    if !streams {
        drop(receiver);
        pulled.await?;
        return Ok(done(false));
    }
    // Dropping the stream, as happens when the client disconnects, ends the download. What has come is kept.
    let pulled = tokio::spawn(pulled);
    let events = stream::unfold((receiver, Some(pulled)), |(mut receiver, pulled)| async move {
        if let Some(progress) = receiver.recv().await {
            return Some((StreamEvent::json(&progress), (receiver, pulled)));
        }
        let event = match pulled?.await {
            Ok(Ok(_)) => StreamEvent::json(&OllamaProgress::status("success")),
            Ok(Err(error)) => StreamEvent::json(&ApiError::from(error).ollama_body()),
            Err(_) => StreamEvent::json(&ApiError::internal("the download has ended").ollama_body()),
        };
        Some((event, (receiver, None)))
    });
    Ok(sse::respond(events, sse::JSON_LINES))
}

/// Downloads a model and sends how far that is, as long as somebody listens.
fn pull_to(
    library: &dyn ModelLibrary,
    name: &str,
    sender: &mpsc::Sender<OllamaProgress>,
) -> Result<String, LibraryError> {
    // Without a stream there is no receiver from the beginning.
    let streams = !sender.is_closed();
    let _ = sender.try_send(OllamaProgress::status("pulling manifest"));
    let mut last: Option<(String, Instant)> = None;
    library.pull(name, &mut |progress| {
        if streams && sender.is_closed() {
            return ControlFlow::Break(());
        }
        let is_new = last.as_ref().is_none_or(|(file, at)| *file != progress.file || at.elapsed() >= PROGRESS_INTERVAL);
        if is_new || progress.done == progress.total {
            last = Some((progress.file.clone(), Instant::now()));
            // A client that reads slowly misses some of them.
            let _ = sender.try_send(OllamaProgress::of_file(progress));
        }
        ControlFlow::Continue(())
    })
}

/// Give a model a further name
#[utoipa::path(
    post, path = "/api/create", tag = "ollama", security(("key" = []), ("x-api-key" = [])),
    request_body = OllamaCreateRequest,
    responses(
        (status = 200, description = "The name stands for the model",
            content((OllamaProgress = "application/json"), (OllamaProgress = "application/x-ndjson"))),
        OllamaErrors,
    )
)]
pub async fn create(
    State(app): State<SharedApp>,
    operator: Result<LocalOperator, ApiError>,
    JsonBody(request, _): JsonBody<OllamaCreateRequest>,
) -> Result<Response, ApiError> {
    let streams = request.stream != Some(false);
    let from = request.base()?;
    let alias = model_name(OllamaModelName { model: request.model, name: request.name })?;
    set_alias(&app, operator, alias, from).await?;
    Ok(done(streams))
}

impl OllamaCreateRequest {
    /// The model that the new name stands for. An error if more is asked for than a name.
    fn base(&self) -> Result<String, ApiError> {
        let has_text = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        let has_value = |value: &Option<Value>| match value {
            None | Some(Value::Null) => false,
            Some(Value::Object(fields)) => !fields.is_empty(),
            Some(Value::Array(items)) => !items.is_empty(),
            Some(_) => true,
        };
        let changes = [
            ("system", has_text(&self.system)),
            ("template", has_text(&self.template)),
            ("parameters", has_value(&self.parameters)),
            ("files", has_value(&self.files)),
            ("adapters", has_value(&self.adapters)),
            ("messages", has_value(&self.messages)),
            ("quantize", has_text(&self.quantize)),
        ];
        if let Some((field, _)) = changes.iter().find(|(_, is_given)| *is_given) {
            return Err(ApiError::unsupported(*field, "a new name stands for a model as it is: give `from` alone"));
        }
        if let Some(from) = self.from.as_ref().filter(|from| !from.is_empty()) {
            return Ok(from.clone());
        }
        let lines: Vec<_> = self.modelfile.iter().flat_map(|file| file.lines()).map(str::trim).collect();
        let mut lines = lines.into_iter().filter(|line| !line.is_empty() && !line.starts_with('#'));
        match (lines.next(), lines.next()) {
            (Some(line), None) if line.get(..5).is_some_and(|word| word.eq_ignore_ascii_case("FROM ")) => {
                Ok(line[5..].trim().to_owned())
            }
            (None, _) => Err(ApiError::missing("from")),
            _ => Err(ApiError::unsupported("modelfile", "only the line `FROM name` is supported")),
        }
    }
}

/// Give a model a further name
#[utoipa::path(
    post, path = "/api/copy", tag = "ollama", security(("key" = []), ("x-api-key" = [])),
    request_body = OllamaCopyRequest,
    responses((status = 200, description = "The name stands for the model"), OllamaErrors)
)]
pub async fn copy(
    State(app): State<SharedApp>,
    operator: Result<LocalOperator, ApiError>,
    JsonBody(request, _): JsonBody<OllamaCopyRequest>,
) -> Result<StatusCode, ApiError> {
    set_alias(&app, operator, request.destination, request.source).await?;
    Ok(StatusCode::OK)
}

async fn set_alias(
    app: &App,
    operator: Result<LocalOperator, ApiError>,
    alias: String,
    model: String,
) -> Result<(), ApiError> {
    let library = app.models().library().cloned().ok_or_else(not_managed)?;
    operator?;
    let set = on_thread(move || library.set_alias(untagged(&alias), untagged(&model)));
    Ok(set.await?)
}

/// Delete a model or an alias
#[utoipa::path(
    delete, path = "/api/delete", tag = "ollama", security(("key" = []), ("x-api-key" = [])),
    request_body = OllamaModelName,
    responses((status = 200, description = "It is deleted"), OllamaErrors)
)]
pub async fn delete(
    State(app): State<SharedApp>,
    operator: Result<LocalOperator, ApiError>,
    JsonBody(request, _): JsonBody<OllamaModelName>,
) -> Result<StatusCode, ApiError> {
    let name = model_name(request)?;
    let library = app.models().library().cloned().ok_or_else(not_managed)?;
    operator?;
    let name = untagged(&name).to_owned();
    // An alias is deleted without its model.
    if let Some(slot) = app.models().slot(&name) {
        app.models().remove(&slot).await;
    }
    on_thread(move || library.delete(&name)).await?;
    Ok(StatusCode::OK)
}

/// Uploading models.
pub async fn push(_: Request) -> ApiError {
    ApiError::new(ApiErrorKind::Invalid, "this server uploads nothing").code("unsupported_operation")
}

fn untagged(name: &str) -> &str {
    name.strip_suffix(LATEST).unwrap_or(name)
}

fn done(streams: bool) -> Response {
    let progress = OllamaProgress::status("success");
    match streams {
        true => sse::respond(stream::iter([StreamEvent::json(&progress)]), sse::JSON_LINES),
        false => Json(progress).into_response(),
    }
}
