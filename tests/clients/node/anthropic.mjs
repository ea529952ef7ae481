// The calls of Anthropic's own client for Node: node anthropic.mjs GRPC REST
import assert from 'node:assert/strict'
import Anthropic from '@anthropic-ai/sdk'

const client = new Anthropic({ baseURL: `http://${process.argv[3]}`, apiKey: 'none', maxRetries: 0, timeout: 60_000 })
const asked = { model: 'chat', max_tokens: 12, messages: [{ role: 'user', content: 'Describe Paris.' }] }
const greedy = { ...asked, temperature: 0 }
const schema = {
  type: 'object',
  properties: { name: { enum: ['Paris', 'Berlin'] } },
  required: ['name'],
  additionalProperties: false,
}

const whole = await client.messages.create(greedy)
assert.equal(whole.stop_reason, 'max_tokens')
const stream = client.messages.stream(greedy)
let text = ''
stream.on('text', (part) => (text += part))
const final = await stream.finalMessage()
assert.equal(text, whole.content[0].text)
assert.deepEqual(final.content, whole.content)
assert.equal(final.usage.output_tokens, 12)
const kinds = []
for await (const event of await client.messages.create({ ...asked, stream: true })) kinds.push(event.type)
assert.equal(kinds[0], 'message_start')
assert.equal(kinds.at(-1), 'message_stop')

const counted = await client.messages.countTokens({ model: 'chat', messages: asked.messages })
assert.equal(counted.input_tokens, whole.usage.input_tokens + whole.usage.cache_read_input_tokens)

const tools = [{ name: 'city', input_schema: schema }]
for (const tool_choice of [{ type: 'any' }, { type: 'tool', name: 'city' }]) {
  const called = await client.messages.stream({ ...asked, max_tokens: 150, tools, tool_choice }).finalMessage()
  assert.equal(called.stop_reason, 'tool_use')
  assert.ok(['Paris', 'Berlin'].includes(called.content[0].input.name))
  const result = { type: 'tool_result', tool_use_id: called.content[0].id, content: 'stored' }
  const messages = [...asked.messages, { role: 'assistant', content: called.content }, { role: 'user', content: [result] }]
  await client.messages.create({ ...asked, tools, messages })
}

await assert.rejects(client.messages.create({ ...asked, model: 'nothing' }), (error) => {
  assert.ok(error instanceof Anthropic.NotFoundError)
  return error.error.error.type === 'not_found_error'
})
await assert.rejects(client.messages.create({ ...asked, max_tokens: undefined }), Anthropic.BadRequestError)
for await (const _ of await client.messages.create({ ...asked, max_tokens: 1500, stream: true })) break
