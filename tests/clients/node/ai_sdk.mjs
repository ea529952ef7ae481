// The calls of the AI SDK through its provider for servers that are like OpenAI's: node ai_sdk.mjs GRPC REST
import assert from 'node:assert/strict'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { embedMany, generateObject, generateText, stepCountIs, streamObject, streamText, tool } from 'ai'
import { z } from 'zod'

const baseURL = `http://${process.argv[3]}/v3`
const options = { name: 'served', baseURL, apiKey: 'none', includeUsage: true, supportsStructuredOutputs: true }
const served = createOpenAICompatible(options)
const model = served.chatModel('chat')
const City = z.object({ name: z.enum(['Paris', 'Berlin']), size: z.number().int().min(0).max(99) })
const asked = { model, prompt: 'Describe Paris.', maxOutputTokens: 150, maxRetries: 0, temperature: 0 }

const whole = await generateText({ ...asked, maxOutputTokens: 12 })
const streamed = streamText({ ...asked, maxOutputTokens: 12 })
let text = ''
for await (const part of streamed.textStream) text += part
assert.equal(text, whole.text)
assert.equal((await streamed.usage).outputTokens, 12)
assert.equal(await streamed.finishReason, 'length')

City.parse((await generateObject({ ...asked, schema: City })).object)
const growing = streamObject({ ...asked, schema: City })
let steps = 0
for await (const _ of growing.partialObjectStream) steps += 1
assert.ok(steps > 1)
City.parse(await growing.object)
assert.ok(['a', 'b'].includes((await generateObject({ ...asked, output: 'enum', enum: ['a', 'b'] })).object))

const tools = {
  weather: tool({
    description: 'Tells the weather of a city.',
    inputSchema: z.object({ city: z.enum(['Paris', 'Berlin']) }),
    execute: async ({ city }) => `sunny in ${city}`,
  }),
}
for (const toolChoice of ['required', { type: 'tool', toolName: 'weather' }]) {
  const called = await generateText({ ...asked, tools, toolChoice, stopWhen: stepCountIs(2) })
  assert.equal(called.steps.length, 2)
  assert.match(called.steps[0].toolResults[0].output, /sunny in (Paris|Berlin)/)
}
const kinds = new Set()
for await (const part of streamText({ ...asked, tools, toolChoice: 'required' }).fullStream) kinds.add(part.type)
for (const kind of ['tool-input-start', 'tool-input-delta', 'tool-call', 'tool-result', 'finish']) assert.ok(kinds.has(kind))

assert.ok((await generateText({ ...asked, model: served.completionModel('chat'), maxOutputTokens: 4 })).text)
const embedded = await embedMany({ model: served.embeddingModel('words'), values: ['a cat', 'a dog'], maxRetries: 0 })
assert.equal(embedded.embeddings.length, 2)
await assert.rejects(generateText({ ...asked, model: served.chatModel('nothing') }), (error) => error.statusCode === 404)
