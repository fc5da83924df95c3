//! Models in Anthropic's format, for `/v1/models`.

use axum::http::HeaderMap;
use serde::Serialize;
use utoipa::ToSchema;

use crate::app::App;

/// Whether a request comes from a client of Anthropic's API, all of which send this header.
pub fn is_messages_client(headers: &HeaderMap) -> bool {
    headers.contains_key("anthropic-version")
}

#[derive(Serialize, ToSchema)]
pub struct MessagesModelList {
    data: Vec<MessagesModel>,
    has_more: bool,
    first_id: Option<String>,
    last_id: Option<String>,
}

impl MessagesModelList {
    pub fn new(data: Vec<MessagesModel>) -> Self {
        let id = |model: Option<&MessagesModel>| model.map(|model| model.id.clone());
        Self { first_id: id(data.first()), last_id: id(data.last()), has_more: false, data }
    }
}

#[derive(Serialize, ToSchema)]
pub struct MessagesModel {
    /// Always `model`
    #[schema(value_type = String)]
    r#type: &'static str,
    id: String,
    display_name: String,
    /// Start of the server, in RFC 3339
    created_at: String,
    /// Always `active`
    #[schema(value_type = String)]
    lifecycle: &'static str,
    /// Context size, once the model is loaded
    max_input_tokens: Option<usize>,
    /// The same: prompt and output share the context
    max_tokens: Option<usize>,
}

impl MessagesModel {
    pub fn new(app: &App, name: &str) -> Self {
        let slot = app.models().slot(name);
        let context = slot.and_then(|slot| slot.stage().model().ok()).map(|model| model.context);
        let created = i64::try_from(app.created()).ok().and_then(|seconds| jiff::Timestamp::from_second(seconds).ok());
        Self {
            r#type: "model",
            id: name.to_owned(),
            display_name: name.to_owned(),
            created_at: created.unwrap_or_default().to_string(),
            lifecycle: "active",
            max_input_tokens: context,
            max_tokens: context,
        }
    }

    /// The same under the name that the client gave.
    pub fn called(mut self, name: &str) -> Self {
        name.clone_into(&mut self.id);
        self
    }
}
