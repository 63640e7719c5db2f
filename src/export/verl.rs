//! verl's `AgentLoopOutput`, a line each, with the names that verl's keys are made of.

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::routing::Experts;
use super::rows::Row;

#[derive(Serialize)]
pub(super) struct Line<'a> {
    output: AgentLoopOutput<'a>,
    #[serde(flatten)]
    columns: Map<String, Value>,
}

#[derive(Serialize)]
struct AgentLoopOutput<'a> {
    prompt_ids: &'a [u32],
    response_ids: &'a [u32],
    response_mask: Vec<u8>,
    /// 0 where the mask is 0.
    response_logprobs: Vec<f32>,
    routed_experts: Option<&'a Experts>,
    reward_score: Option<f64>,
    /// Each call is a turn, and so is what it was asked.
    num_turns: usize,
    metrics: Map<String, Value>,
    extra_fields: Value,
}

pub(super) fn line<'a>(row: &'a Row<'_>) -> Line<'a> {
    let (prompt_ids, response_ids) = row.sample.token_ids.split_at(row.prompt_len());
    // verl reads the keys of any row in all of them.
    let reward_extra_info = json!({
        "episode_id": row.episode.trial, "group_id": row.episode.group_id, "sample_index": row.index,
        "episode_samples": row.of, "advantage": row.episode.advantage,
        "group_is_complete": row.group.is_complete(), "weight_version_min": row.versions().first(),
        "weight_version_max": row.versions().last(),
    });
    let output = AgentLoopOutput {
        prompt_ids,
        response_ids,
        response_mask: row.mask().map(u8::from).collect(),
        response_logprobs: row.logprobs().collect(),
        routed_experts: row.experts.as_ref(),
        reward_score: row.episode.reward,
        num_turns: 2 * row.turns,
        metrics: Map::new(),
        extra_fields: json!({"reward_extra_info": reward_extra_info}),
    };
    Line { output, columns: row.columns() }
}
