//! `LocalOperator`: who may change what this machine stores or shares: who has a key, and, on a server without keys, a
//! program on this machine. A page in a browser on this machine may not: its requests have an `Origin`.

use std::net::IpAddr;

use axum::extract::FromRequestParts;
use axum::http::header::ORIGIN;
use axum::http::request::Parts;

use crate::app::SharedApp;
use crate::error::{ApiError, ApiErrorKind};

/// What proxies add to requests of others.
const FORWARDED: [&str; 2] = ["forwarded", "x-forwarded-for"];

/// The address that a request comes from. [`crate::Listener`] adds it to the request's extensions.
#[derive(Clone, Copy, Debug)]
pub struct RemoteAddress(pub IpAddr);

/// The proof that the caller may do so. Behind [`crate::auth::authenticate`], which has checked the key.
pub struct LocalOperator;

impl FromRequestParts<SharedApp> for LocalOperator {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &SharedApp) -> Result<Self, ApiError> {
        if !app.keys().is_empty() {
            return Ok(Self);
        }
        let address = parts.extensions.get::<RemoteAddress>().map(|address| address.0.to_canonical());
        let is_passed_on = FORWARDED.iter().any(|name| parts.headers.contains_key(*name));
        let is_local = address.is_some_and(|address| address.is_loopback());
        if is_local && !is_passed_on && !parts.headers.contains_key(ORIGIN) {
            return Ok(Self);
        }
        let message = "this server has no API key: what it stores is changed by programs on its own machine only";
        Err(ApiError::new(ApiErrorKind::Forbidden, message).code("not_local"))
    }
}
